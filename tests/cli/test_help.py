"""What the command line says of itself: within the terminal's width, in words that can be typed."""

import re
import shlex

import pytest
from helpers.refused import refused
from helpers.registered import OWN_ALGORITHMS

from jaxrl.cli import commands, main, runs, table, values
from jaxrl.cli.values import Kind, Part
from jaxrl.core.errors import ConfigError
from jaxrl.run.presets import PRESETS

TORSO = next(flag for flag in table.algorithm_flags("ppo")[0] if flag.name == "network.torso").kind


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
    of_commands = {name: table.command_flags(name) for name in table.load()["commands"]}
    of_algorithms = {name: table.algorithm_flags(name)[0] for name in table.load()["algorithms"]}
    flags = [(place, flag) for place, its in [*of_commands.items(), *of_algorithms.items()] for flag in its]
    known = {flag.option for _, flag in flags} | {f"{flag.option.partition('.')[0]}.*" for _, flag in flags}
    known |= {flag.option for flag in commands.Doctor.flags("doctor")}
    for place, flag in flags:
        name = flag.name.rpartition(".")[2]
        assert "`" not in flag.help and not re.search(r"\bjaxrl\.\w", flag.help), (place, flag)
        assert "_" not in name or not re.search(rf"(?<![\w.:-]){name}(?![\w:.=])", flag.help), (place, flag)
        mentioned = re.findall(r"(?<![\w-])--[a-z](?:[\w-]|\.(?=[\w*])|\*)*", flag.help)
        assert {*mentioned} <= known, (place, flag)


def test_help_begins_with_an_example_and_what_is_required(said):
    printed = said("train", "ppo", "--help")
    places = [printed.index(text) for text in ("jaxrl train ppo --env", "usage:", "required options", "PPO options")]
    places += [printed.index(text) for text in ("run options", "evaluation and files options")]
    assert places == sorted(places)
    required = printed[places[2] : places[3]]
    assert "--env TEXT" in required and "--total-steps N" in required and required.count("(required)") == 2
    imitation = said("train", "bc", "--help")
    required = imitation[imitation.index("required options") : imitation.index("BC options")]
    assert "--dataset" in required and "--env" not in required
    assert "required options" not in said("train", "--preset", "purejaxrl-cartpole", "--help")


@pytest.mark.long
@pytest.mark.parametrize("command", ["train", "compile", "sweep", "tune", "pbt"])
def test_every_example_could_be_typed(said, command):
    presets = [name for name in PRESETS if command == "train" or not name.startswith("mixed")]
    asked = [[name] for name in OWN_ALGORITHMS if name in table.algorithms(command)]
    for words in asked + [["--preset", name] for name in presets]:
        first, *lines = said(command, *words, "--help", columns=60).partition("\n\n")[0].split("\n")
        assert first == "For example:" and all(len(line) <= 60 for line in lines)
        program, typed, *words = shlex.split(" ".join(line.removesuffix("\\") for line in lines))
        assert (program, typed) == ("jaxrl", command)
        if "--preset" not in words or table.preset(words[1])["defaults"]["env"].startswith("gymnax:"):
            assert runs.read(command, words)  # the packages of other suites may not be installed


@pytest.mark.parametrize("words", [[], ["train"], ["train", "ppo"], ["eval"], ["algos"], ["help"]])
def test_help_is_a_command(said, words):
    assert said("help", *words) == said(*([] if words == ["help"] else words), "--help")


@pytest.mark.parametrize(
    "text, meant",
    [
        ("mlp:64:64", "mlp:64,64"),
        ("mlp:64:64:relu", "mlp:64,64:relu"),
        ("mlp:256,128:64", "mlp:256,128,64"),
    ],
)
def test_numbers_with_colons_between(text, meant):
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {meant!r}?")):
        values.read(TORSO, text)
    values.read(TORSO, meant)


def test_a_number_in_the_place_of_a_name():
    part = Kind("part", (Part("cell", {"width": Kind("int"), "activation": Kind("text")}, dict),))
    refused(lambda: values.read(part, "cell:8:64"), "cell:width:activation")
    assert values.build(values.read(part, "cell:8:relu")) == {"width": 8, "activation": "relu"}


@pytest.mark.parametrize(
    "words", [["eval"], ["render"], ["export-rlds", "--out", "o"], ["export-replay", "--out", "o"]]
)
def test_a_run_that_is_misspelt_offers_the_close_one(words, tmp_path, capsys):
    (tmp_path / "cartpole").mkdir()
    (tmp_path / "cartpole" / "config.json").write_text("{}")
    command, *others = words
    assert main.main([command, str(tmp_path / "cartpol"), *others]) == 2
    assert f"did you mean {tmp_path}/cartpole?" in capsys.readouterr().err
