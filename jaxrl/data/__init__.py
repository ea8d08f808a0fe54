"""Episodes to and from the datasets of other programs."""

from jaxrl.data.dataset import Dataset, load_dataset
from jaxrl.data.episodes import Episode, EpisodeCutter
from jaxrl.data.export import export_minari, export_rlds
from jaxrl.data.minari import MinariWriter
from jaxrl.data.recorder import Record
from jaxrl.data.replays import export_replay
from jaxrl.data.report import Report
from jaxrl.data.rlds import RldsWriter

__all__ = [
    "Dataset",
    "Episode",
    "EpisodeCutter",
    "MinariWriter",
    "Record",
    "Report",
    "RldsWriter",
    "export_minari",
    "export_replay",
    "export_rlds",
    "load_dataset",
]
