"""Host environments that go wrong when they are told to."""

import dataclasses

from helpers.served import JaxHostEnvironment, ServedFromHost


@dataclasses.dataclass(frozen=True, eq=False)
class Spoiled(ServedFromHost):
    """Environments that do `then(environment)` before step number `at`; 0 is a reset."""

    at: int = 20
    then: object = None
    built: list = dataclasses.field(default_factory=list)

    def build(self, num_envs, seed, first_env=0):
        host = SpoiledEnvironment(self.env, num_envs, seed, first_env)
        host.at, host.then, host.steps, host.closed = self.at, self.then, 0, 0
        self.built.append(host)
        return host


class SpoiledEnvironment(JaxHostEnvironment):
    name = "spoiled"

    def reset(self):
        if self.at == 0:
            self.then(self)
        return super().reset()

    def step(self, actions):
        self.steps += 1
        if self.steps == self.at:
            self.then(self)
        return super().step(actions)

    def close(self):
        self.closed += 1
        super().close()
