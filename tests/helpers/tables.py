"""A table in plain Python, by Reverb's rules: the oracle of `jaxrl.buffers.item_table`."""

import numpy as np

from jaxrl.core.sources import Fifo, Lifo, MaxHeap, MinHeap, Prioritized, Uniform

# Each sampler, each remover and how often an item may be drawn.
RULES = [
    (Uniform(), Fifo(), 0),
    (Prioritized(0.6), Lifo(), 2),
    (Fifo(), Lifo(), 1),
    (Lifo(), MaxHeap(), 3),
    (MinHeap(), Fifo(), 2),
    (MaxHeap(), MinHeap(), 0),
]


class Model:
    """A list of items in the order of insertion, each a dictionary.

    Args:
      rules: a `jaxrl.buffers.item_table.Table`.
    """

    def __init__(self, rules):
        self.rules, self.items, self.clock, self.number = rules, [], 0, 0

    def pick(self, sampler):
        """The items that the sampler may choose, with their chances."""
        if isinstance(sampler, Uniform | Prioritized):
            weights = np.ones(len(self.items))
            if isinstance(sampler, Prioritized):
                raised = [i["priority"] ** sampler.exponent if i["priority"] > 0 else 0.0 for i in self.items]
                weights = np.array(raised) if sum(raised) > 0 else weights
            return {i["value"]: w for i, w in zip(self.items, weights / weights.sum(), strict=True) if w > 0}
        keys = {
            Fifo: lambda i: i["born"],
            Lifo: lambda i: -i["born"],
            MinHeap: lambda i: (i["priority"], i["touched"]),
            MaxHeap: lambda i: (-i["priority"], i["touched"]),
        }
        return {min(self.items, key=keys[type(sampler)])["value"]: 1.0}

    def remove(self, value):
        self.items = [i for i in self.items if i["value"] != value]

    def find(self, value):
        return next((i for i in self.items if i["value"] == value), None)

    def insert(self, value, priority):
        self.clock += 1
        self.items.append({"value": value, "priority": priority, "born": self.clock, "touched": self.clock, "times": 0})
        if len(self.items) > self.rules.capacity:
            self.remove(next(iter(self.pick(self.rules.remover))))

    def draw(self, value):
        """Counts a draw of an item, which goes if it was drawn often enough; gives it."""
        item = self.find(value)
        item["times"] += 1
        if self.rules.max_times_sampled and item["times"] >= self.rules.max_times_sampled:
            self.remove(value)
        return item

    def update(self, value, priority):
        """Gives an item a new priority, if it is there."""
        if (item := self.find(value)) is not None:
            self.clock += 1
            item |= {"priority": priority, "touched": self.clock}
