"""Videos of a run while it trains: at their steps, of the policy of that step, and without a change to the run."""

import pytest
from helpers import programs
from helpers.events import all_events
from helpers.programs import ENV, ROWS, assert_equal
from PIL import Image

from jaxrl.run.directory.loading import load_run
from jaxrl.run.recording import rendering


def train(run_dir=None, **settings):
    settings = {"total_steps": 5 * ROWS, "evaluate_every": 0, "seed": 4, "checkpoint_every": ROWS, "keep": 9} | settings
    return programs.train(run_dir, evaluation_episodes=2, **settings)


def frames(path):
    return Image.open(path).n_frames


@pytest.mark.long
def test_an_episode_every_so_many_steps(tmp_path):
    path = tmp_path / "run"
    filmed = train(run_dir=path, video_every=2 * ROWS)
    assert_equal(filmed.state, train().state)
    videos = sorted((path / "videos").iterdir())
    assert [video.name for video in videos] == [f"{step * ROWS:012d}.gif" for step in (2, 4, 5)]
    run = load_run(path, step=2 * ROWS)
    again = rendering.render(run.policy, ENV, tmp_path / "again.gif", seed=4)
    assert again.read_bytes() == videos[0].read_bytes()
    assert frames(videos[0]) > 2
    shown = {
        event.step: value.image.encoded_image_string
        for events in all_events(path / "tensorboard")
        for event in events
        for value in event.summary.value
        if value.tag == "video"
    }
    assert shown == {int(video.stem): video.read_bytes() for video in videos}
    (path / "videos" / "mine.gif").write_bytes(b"kept")
    train(run_dir=path, total_steps=ROWS, overwrite=True)
    assert [video.name for video in (path / "videos").iterdir()] == ["mine.gif"]


@pytest.mark.long
def test_a_video_that_fails_costs_no_run_its_end(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("the disk is full")

    monkeypatch.setattr(rendering, "render", fail)
    with pytest.warns(RuntimeWarning, match=f"step {ROWS}: the disk"):
        result = train(run_dir=tmp_path, total_steps=ROWS, video_every=ROWS)
    assert result.stopped == "finished"
