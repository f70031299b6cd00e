"""`jaxpar schedule`: pictures, JSON, and one sentence for whatever cannot work."""

import doctest
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxpar.cli.schedule import main, parse_costs
from jaxpar.pipeline import draw
from jaxpar.pipeline.table import lower
from jaxpar.pipeline.timing import Costs, bubble, makespan

GOLDEN = Path(__file__).parent / "golden" / "schedules"
PICTURES = {
    "gpipe_4_stages_4_microbatches": ("gpipe", 4, 4, 1),
    "1f1b_4_stages_8_microbatches": ("1f1b", 4, 8, 1),
    "interleaved_2_stages_4_microbatches_2_chunks": ("interleaved", 2, 4, 2),
}
ANSI = re.compile(r"\x1b\[[0-9;]*m")
SVG = "{http://www.w3.org/2000/svg}"


# ---- pictures ----


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_equals_the_golden_one(name):
    expected = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert draw.text(lower(*PICTURES[name]), color=False, width=100) + "\n" == expected


def test_colours_add_codes_only_and_tell_f_from_b():
    table = lower("1f1b", 2, 2)
    coloured = draw.text(table, color=True)
    assert "\x1b[" not in draw.text(table, color=False)
    f_code, b_code = (re.search(rf"(\x1b\[[0-9;]*m){task}", coloured)[1] for task in ("F0", "B1"))
    assert f_code != b_code
    squeeze = str.maketrans("", "", " \n")
    bare = draw.text(table, color=False).translate(squeeze)
    assert ANSI.sub("", coloured).translate(squeeze) == bare


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_the_picture_fits_the_terminal_and_shows_every_tick(width):
    table = lower("interleaved", 4, 8, 2)
    picture = draw.text(table, color=False, width=width).split("\nticks ")[0]
    assert max(map(len, picture.splitlines()[1:])) <= width
    ticks = [int(n) for row in re.findall(r"^tick +(.*)$", picture, re.M) for n in row.split()]
    assert ticks == list(range(len(table.ticks)))
    for stage in range(4):
        rows = " ".join(re.findall(rf"^stage {stage} +(.*)$", picture, re.M)).split()
        assert rows == [task.text(2) for task in table.orders[stage]]


def test_the_svg_draws_every_task_as_wide_as_its_cost():
    table, costs = lower("interleaved", 3, 6, 2), Costs(F=1, B=1.5, W=0.5, send=0.25)
    root = ElementTree.fromstring(draw.svg(table, costs))
    tasks = root.findall(f"{SVG}rect")[1:]  # the first is the background
    assert len(tasks) == sum(map(len, table.orders))
    widths = {rect.get("fill"): float(rect.get("width")) for rect in tasks}
    assert widths[draw.FILLS["B"]] == pytest.approx(2 * widths[draw.FILLS["F"]], rel=0.01)
    ends = [float(line.get("x1")) for line in root.findall(f"{SVG}line")]
    pixels = widths[draw.FILLS["F"]] / 0.5
    assert ends[-1] - 70 == pytest.approx(pixels * makespan(table, costs), rel=0.01)
    assert max(float(r.get("x")) + float(r.get("width")) for r in tasks) <= ends[-1] + 0.2
    words = [text.text for text in root.findall(f"{SVG}text")]
    assert {"F0.0", "B5.1", "makespan", "bubble", "live", "slots", "messages"} <= set(words)


def test_the_svg_of_a_function_without_a_name_is_well_formed():
    def order(stage, stages, microbatches, chunks):
        return lower("gpipe", stages, microbatches).orders[stage]

    order.__name__ = "<lambda> & co"
    root = ElementTree.fromstring(draw.svg(lower(order, 2, 2), Costs(F=0, send=1)))
    assert root.find(f"{SVG}text").text.startswith("<lambda> & co: 2 stages")


# ---- the command ----


def run(capsys, *argv):
    code = main(list(argv))
    return code, *capsys.readouterr()


def test_json_is_one_object_with_the_table_and_its_numbers(capsys):
    code, out, err = run(capsys, "1f1b", "--stages", "2", "--microbatches", "3", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "schedule": "1f1b",
        "stages": 2,
        "microbatches": 3,
        "chunks": 1,
        "ticks": 5,
        "makespan": 12.0,
        "makespan_async": 12.0,
        "bubble": pytest.approx(1 / 4),
        "live": [3, 1],
        "slots": [3, 1],
        "messages": {"forward": 3, "backward": 3},
        "table": [
            [["F0"], []],
            [["F1"], ["F0", "B0"]],
            [["F2", "B0"], ["F1", "B1"]],
            [["B1"], ["F2", "B2"]],
            [["B2"], []],
        ],
    }


def test_json_names_chunks_and_uses_the_costs(capsys):
    argv = ["interleaved", "--stages=4", "--microbatches=8", "--chunks=2", "--json"]
    _, out, _ = run(capsys, *argv, "--costs", "F=2,B=3,W=1,send=0.5")
    got, table = json.loads(out), lower("interleaved", 4, 8, 2)
    assert got["table"][0] == [["F0.0"], [], [], []]
    assert got["makespan"] == (2 * 8 + 3) / 2 * 6 + 0.5 * (got["ticks"] - 1)
    assert got["bubble"] == bubble(table, Costs(F=2, B=3, W=1, send=0.5))
    assert got["messages"] == {"forward": 8 * 7, "backward": 8 * 7}


def test_the_plain_command_draws_and_writes_the_svg(capsys, tmp_path):
    file = tmp_path / "out.svg"
    code, out, _ = run(capsys, "gpipe", "--stages", "2", "--microbatches", "2", "--svg", str(file))
    assert code == 0 and out.startswith("gpipe: 2 stages, 2 microbatches, 1 chunk\n")
    assert file.read_text(encoding="utf-8") == draw.svg(lower("gpipe", 2, 2))


def test_compare_puts_all_schedules_side_by_side(capsys):
    code, out, _ = run(capsys, "--compare", "--stages", "4", "--microbatches", "8", "--chunks", "2")
    rows = {line[:17].strip(): line[17:].split() for line in out.splitlines()}
    assert code == 0 and rows["schedule"] == ["gpipe", "1f1b", "interleaved"]
    assert rows["chunks"] == ["2", "1", "2"]
    assert rows["makespan"] == ["28.5", "33", "28.5"]
    _, out, _ = run(capsys, "--compare", "--json")
    assert [entry["schedule"] for entry in json.loads(out)] == ["gpipe", "1f1b", "interleaved"]


def test_costs_left_out_keep_their_default():
    assert parse_costs("") == Costs() == parse_costs("F=1, B=1, W=1, send=0")
    assert parse_costs("B=2.5") == Costs(B=2.5)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["1f2b"], 'did you mean "1f1b"'),
        ([], "name one of gpipe, 1f1b, interleaved, or use --compare"),
        (["1f1b", "--chunks", "2"], 'use schedule="interleaved" with chunks=2'),
        (["1f1b", "--stages", "0"], "stages=0: a schedule needs an integer >= 1"),
        (["1f1b", "--stages", "x"], "--stages: invalid int value: 'x'"),
        (["1f1b", "--stage", "4"], "unrecognized arguments: --stage 4"),
        (["1f1b", "--costs", "F=1,Q=2"], '"Q=2" does not set one of F, B, W, send once'),
        (["1f1b", "--costs", "F=1,F=2"], '"F=2" does not set one of F, B, W, send once'),
        (["1f1b", "--costs", "F=fast"], '"F=fast" is not a number; use for example F=1'),
        (["1f1b", "--costs", "F=-1"], "cost F=-1.0: a time is finite and >= 0"),
        (["1f1b", "--costs", "F=0,B=0,W=0"], "a step needs some work"),
        (["1f1b", "--svg", "no/such/folder/out.svg"], "no/such/folder/out.svg"),
        (["--compare", "gpipe"], 'ignores the schedule "gpipe"'),
        (["--compare", "--svg", "out.svg"], "ignores --svg"),
    ],
)
def test_what_cannot_work_ends_in_one_sentence_and_exit_code_2(capsys, argv, says):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert says in err and err.startswith("jaxpar schedule: ") and err.count("\n") == 1


def test_help_explains_the_costs_and_exits_with_0(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "pays B+W for each B" in " ".join(out.split())


def test_schedules_and_their_pictures_need_no_jax():
    modules = "schedules", "table", "timing", "slots", "split", "draw"
    root = Path(draw.__file__).parent
    for name in modules:
        assert "jax" not in re.findall(
            r"^(?:import|from) (\w+)", (root / f"{name}.py").read_text(encoding="utf-8"), re.M
        )


def test_the_page_on_schedules_runs_as_written():
    page = Path(__file__).parents[1] / "docs" / "schedules.md"
    failed, tried = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert failed == 0 and tried > 5
