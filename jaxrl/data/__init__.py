"""Import and export of episodes in the dataset formats of other programs."""

from jaxrl.data.dataset import Dataset, load_dataset
from jaxrl.data.dataset_report import Report
from jaxrl.data.episodes import Episode
from jaxrl.data.minari import MinariWriter
from jaxrl.data.rlds import RldsWriter
from jaxrl.data.rows import EpisodeCutter

__all__ = [
    "Dataset",
    "Episode",
    "EpisodeCutter",
    "MinariWriter",
    "Report",
    "RldsWriter",
    "load_dataset",
]


def __dir__() -> list[str]:
    return sorted(__all__)
