"""Episodes to and from the datasets of other programs."""

from jaxrl.data.dataset import Dataset, Report, load_dataset
from jaxrl.data.episodes import Episode, EpisodeCutter
from jaxrl.data.rlds import RldsWriter, export_rlds

__all__ = ["Dataset", "Episode", "EpisodeCutter", "Report", "RldsWriter", "export_rlds", "load_dataset"]
