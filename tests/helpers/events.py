"""TensorBoard's event files, read."""

from pathlib import Path


def read_events(directory: Path) -> tuple[list[int], list[int]]:
    """Return the steps of all files' scalars, and the steps from which a file hides what was written before it."""
    from tensorboardX.proto.event_pb2 import SessionLog

    steps, hidden = [], []
    for events in all_events(directory):
        steps += [
            event.step for event in events if any(value.HasField("simple_value") for value in event.summary.value)
        ]
        hidden += [event.step for event in events if event.session_log.status == SessionLog.START]
    return steps, hidden


def all_events(directory: Path) -> list[list]:
    """Return the events of each file."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        data, at, events = path.read_bytes(), 0, []
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            events.append(Event.FromString(data[at + 12 : at + 12 + size]))
            at += 16 + size
        assert events and events[0].file_version == "brain.Event:2", f"{path} is empty"
        found.append(events)
    return found
