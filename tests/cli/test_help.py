"""What the command line says of itself: within the terminal's width, in words that can be typed."""

import re
import shlex

import pytest
from helpers.refused import refused

import jaxrl
from jaxrl.cli import main, runs, table, values
from jaxrl.cli.values import Kind, Part
from jaxrl.core.errors import ConfigError
from jaxrl.run.presets import PRESETS

TORSO = next(flag for flag in table.algorithm_groups("ppo")[1].flags if flag.name == "torso").kind


@pytest.fixture
def said(capsys, monkeypatch):
    """Runs a command line that must succeed in a terminal of so many columns, and gives what it printed."""

    def run(*argv, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        try:
            found = main.main(list(argv))
        except SystemExit as stopped:
            found = stopped.code
        printed = capsys.readouterr()
        assert found == 0, printed
        return printed.out

    return run


def flags():
    """Every flag of the table, with where it is."""
    for command, its in table.load()["commands"].items():
        yield from ((command, flag["name"], flag["name"], flag.get("help", "")) for flag in its)
    for algorithm, groups in table.load()["algorithms"].items():
        for group in groups:
            prefix = f"{group['title']}." if group["prefix"] else ""
            for flag in group["flags"]:
                yield algorithm, flag["name"], f"{prefix}{flag['name']}", flag.get("help", "")


@pytest.mark.long
@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize(
    "words",
    ["train ppo --help", "train sac --help-all", "train --preset rainbow --help", "compile bc -h", "tune dqn --help"]
    + ["eval --help", "render --help", "export-minari --help", "algos"],
)
def test_lines_are_within_the_terminal(said, words, columns):
    assert [line for line in said(*words.split(), columns=columns).split("\n") if len(line) > columns] == []


def test_help_is_written_without_pythons_names():
    known = {name.rstrip("_").replace("_", "-") for _, _, name, _ in flags()}
    known |= {flag.word for flag in runs._common_flags(None)} | {"network.*", "policy.*", "critic.*", "value.*"}
    known |= {"discriminator.*"}
    for place, name, _, text in flags():
        assert "`" not in text and not re.search(r"\bjaxrl\.\w", text), (place, name, text)
        assert (
            not re.match(r"of |likewise|how many$", text) or text.startswith("of a dictionary") or name == "newest"
        ), (place, name, text)
        assert not re.search(rf"(?<![\w.:-]){name}(?![\w:.=])", text) or "_" not in name, (place, name, text)
        mentioned = set(re.findall(r"(?<![\w-])--([a-z][\w.-]*\*?)", text))
        assert {one.rstrip(".") if not one.endswith("*") else one for one in mentioned} <= known, (place, name, text)


def test_the_flags_that_were_no_sentences():
    text = {(place, name): help_ for place, name, _, help_ in flags()}
    assert text["train", "record_every"].startswith("every n-th episode is recorded. With n environments or more")
    assert text["processes", "num_processes"] == "number of processes of the run"
    assert text["train", "overwrite"] == "delete the run that --run-dir holds, and start again"
    assert text["train", "dataset"].startswith("dataset to learn from, rlds:PATH or minari:ID")
    assert text["ppo", "kl_target"].endswith("only with --objective kl")
    assert text["dqn", "burn_in"].endswith("only with --network.core")
    assert "--value-learning-rate is set" in text["ppo", "learning_rate"]
    assert "jaxrl render" in text["train", "video_every"]


def test_none_is_said_once(said):
    printed = " ".join(said("eval", "--help").replace("│", " ").split())
    assert "step of the checkpoint; None (default): the newest --best" in printed
    preset = " ".join(said("train", "--preset", "rainbow", "--help").replace("│", " ").split())
    assert "--huber" in preset and "None (default): 1 with a replay" not in preset  # the preset has a number


def test_help_begins_with_an_example_and_what_is_required(said):
    printed = said("train", "ppo", "--help")
    places = [printed.index(text) for text in ("jaxrl train ppo --env", "usage:", "required options", "PPO options")]
    assert places == sorted(places)
    required = printed[places[2] : places[3]]
    assert "--env TEXT" in required and "--total-steps N" in required and required.count("(required)") == 2
    assert said("sweep", "ppo", "--help").index("required options") < said("sweep", "ppo", "--help").index("--grid")
    imitation = said("train", "bc", "--help")
    required = imitation[imitation.index("required options") : imitation.index("BC options")]
    assert "--dataset" in required and "--env" not in required
    assert "required options" not in said("train", "--preset", "purejaxrl-cartpole", "--help")


@pytest.mark.long
@pytest.mark.parametrize("command", ["train", "compile", "sweep", "tune", "pbt"])
def test_every_example_could_be_typed(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    own = [name for name in table.algorithms(command) if name in table.load()["algorithms"]]
    presets = [name for name in PRESETS if command == "train" or not name.startswith("mixed")]
    for name, preset in [(name, None) for name in own] + [
        (table.preset(p).algorithm, table.preset(p)) for p in presets
    ]:
        run = runs.Group("run", [*runs._common_flags(preset), *runs._own_flags(command, preset)])
        first, *lines = runs._example(command, name, preset, run).split("\n")
        assert first == "For example:" and all(len(line) <= 60 for line in lines)
        program, typed, *words = shlex.split(" ".join(line.removesuffix("\\") for line in lines))
        assert (program, typed) == ("jaxrl", command)
        if preset is None or preset.env.startswith("gymnax:"):  # the packages of others may not be installed
            assert runs.read(command, words).algorithm == name


def test_an_algorithm_of_ones_own_has_an_example(monkeypatch):
    assert "--env SUITE:NAME" in runs._example("train", "mine", None, runs.Group("run", []))


@pytest.mark.parametrize("words", [[], ["train"], ["train", "ppo"], ["eval"], ["algos"], ["help"]])
def test_help_is_a_command(said, words):
    assert said("help", *words) == said(*([] if words == ["help"] else words), "--help")


@pytest.mark.parametrize(
    "text, meant",
    [
        ("mlp:64:64", "mlp:64,64"),
        ("MLP:64:64", "mlp:64,64"),
        ("mlp:64:64:64", "mlp:64,64,64"),
        ("mlp:64:64:relu", "mlp:64,64:relu"),
        ("mlp:256,128:64", "mlp:256,128,64"),
    ],
)
def test_numbers_with_colons_between(text, meant):
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {meant!r}?")):
        values.read(TORSO, text)
    values.read(TORSO, meant)


def test_a_number_in_the_place_of_a_name():
    part = Part("cell", {"width": Kind("int"), "activation": Kind("text")}, jaxrl.PPO)
    refused(lambda: values.read(Kind("part", (part,)), "cell:8:64"), "cell:width:activation")
    assert values.read(Kind("part", (part,)), "cell:8:relu").arguments == {"width": 8, "activation": "relu"}


@pytest.mark.parametrize(
    "words", [["eval"], ["render"], ["export-rlds", "--out", "o"], ["export-replay", "--out", "o"]]
)
def test_a_run_that_is_misspelt_offers_the_close_one(words, tmp_path, capsys):
    (tmp_path / "cartpole").mkdir()
    (tmp_path / "cartpole" / "config.json").write_text("{}")
    command, *others = words
    assert main.main([command, str(tmp_path / "cartpol"), *others]) == 2
    assert f"did you mean {tmp_path}/cartpole?" in capsys.readouterr().err


def test_algos_shortens_what_the_help_of_a_preset_says(said):
    listed, whole = said("algos"), " ".join(said("train", "--preset", "cleanrl-sac", "--help").split())
    assert "cleanrl/sac_continuous_action.py\n" in listed and "every other step" not in listed
    assert "every other step" in whole
