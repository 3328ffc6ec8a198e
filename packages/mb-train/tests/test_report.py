"""Curves from logs, resumed ones too, and the picture."""

import itertools
import math
import re
import sys
import warnings
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from mb_train.cli import main
from mb_train.logs.run_log import RunLog
from mb_train.report import fonts
from mb_train.report.curves import read_curves, summary
from mb_train.report.page import write_page
from mb_train.report.panels import figure_of, panels_of
from mb_train.report.pictures import draw, report


def write(folder, *events):
    log = RunLog(folder / "log.jsonl")
    for kind, values in events:
        log.write(kind, **values)
    log.close()


def interval(last, losses, load=None):
    return "train", {
        "iteration": last, "lm_losses": losses, "tokens_per_s": 100.0 * last,
        "load_imbalance": load or [], "tokens_per_expert": counts(load), "grad_norm": 1.0,
        "ms_per_iteration": 10.0, "mfu": None, "steps_redone": 0,
    }  # fmt: skip


def valid(iteration, loss, place="iteration"):
    return "eval", {"iteration": iteration, "lm_loss": loss, "place": place}


def test_a_resumed_run_replaces_what_was_beyond_its_start(tmp_path):
    write(
        tmp_path,
        ("start", {"iteration": 0}),
        interval(2, [5.0, 4.0]),
        valid(2, 4.5),
        interval(4, [3.0, 2.0]),
        valid(4, 9.9),
        valid(4, 1.0, "the end of training for test data"),
        ("start", {"iteration": 2}),
        interval(3, [2.5]),
    )
    curves = read_curves(tmp_path)
    assert curves.loss == {1: 5.0, 2: 4.0, 3: 2.5}
    assert curves.valid == {2: 4.5}
    assert curves.tokens_per_s == {2: 200.0, 3: 300.0}
    assert curves.test == {}
    assert dict(summary(curves))["iterations"] == "1 to 3"
    assert dict(summary(curves))["training loss"] == "5.0000 -> 2.5000"


def test_of_an_interval_that_a_start_divides_the_losses_before_it_count(tmp_path):
    events = (interval(2, [5.0, 4.0]), interval(4, [3.0, 2.0]), ("start", {"iteration": 3}))
    write(tmp_path, ("start", {"iteration": 0}), *events)
    curves = read_curves(tmp_path)
    assert curves.loss == {1: 5.0, 2: 4.0, 3: 3.0}
    assert curves.tokens_per_s == {2: 200.0}


def test_what_a_task_tells_beside_its_losses(tmp_path):
    def measured(iteration, **found):
        return "measured", {"iteration": iteration, "place": "the end", **found}

    last = measured(1, accuracy=0.25, **{"most frequent label": float("nan")})
    events = (interval(1, [4.0]), last, interval(2, [3.0]), measured(2, accuracy=1.0))
    write(tmp_path, ("start", {"iteration": 0}), *events, ("start", {"iteration": 1}))
    told = dict(summary(read_curves(tmp_path)))
    assert told["accuracy"] == "0.2500 at iteration 1"
    assert told["most frequent label"] == "not a number at iteration 1"


def test_what_runs_are_compared_by_is_in_words(tmp_path):
    kinds = {"expert exchange": {"busy": 30.0, "alone": 10.0, "calls": 4}}
    kind, values = interval(200, [2.0] * 200, [1.5, 2.0])
    write(
        tmp_path,
        (
            "start",
            {
                "iteration": 0,
                "notes": ["12 layers by peer"],
                "moe_layers": ["layer 1", "mtp 0 layer 0"],
            },
        ),
        (kind, values | {"ms_per_iteration": 200.0, "mfu": 0.5, "steps_redone": 3}),
        ("profile", {"iteration": 12, "step_ms": 200.0, "kinds": kinds}),
        *(valid(iteration, loss) for iteration, loss in ((100, 2.5), (200, 2.25))),
    )
    told = dict(summary(read_curves(tmp_path)))
    assert told["training loss of a step"] == "2.0000 at 100, 2.0000 at 200"
    assert told["validation loss"] == "2.2500 (PPL 9.49) at iteration 200"
    assert told["tokens per second"] == "20,000, the median"
    assert told["expert load, max/mean"] == "layer 1: 1.50, mtp 0 layer 0: 2.00 (at the end)"
    assert told["ms a step"] == "200.0, the median"
    assert told["MFU"] == "0.500, the median"
    assert told["decided at the start"] == "12 layers by peer"
    assert told["steps run again"] == "3, for rows beyond the budget"
    assert told["profile of a step"] == "200.0 ms: expert exchange 15.0% (5.0% alone)"


def counts(load):
    """[layers][4 experts] whose fullest has `load` times the mean."""
    return [[100 * one, *[(400 - 100 * one) / 3] * 3] for one in load or []]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("load", "steps"),
    [(None, 1), ([1.5, 2.0], 2), ([1.0] * 30, 2500)],
    ids=["dense-short", "moe", "deep-long"],
)
def test_the_picture_and_the_page(tmp_path, load, steps):
    write(
        tmp_path,
        ("start", {"iteration": 0, "config": {"seed": 1, "moe_top_k": 2, "load": None}}),
        *(interval(i, [5.0 - i / 9999], load) for i in range(1, steps)),
        interval(steps, [float("nan")], load),
        valid(steps, 4.5),
    )
    text, picture, page = report([tmp_path])
    if steps == 2:
        before = picture.read_bytes()
        assert picture == draw(tmp_path)
        assert picture.read_bytes() == before
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "loss.png", "report.html"]
    assert ("expert load" in text) == (load is not None)
    assert f"the loss is not a number from iteration {steps} on" in text
    content = page.read_text()
    assert content.count("<svg") == (3 if load is None else 5)
    assert f"<tr><td>iterations</td><td>1 to {steps}</td></tr>" in content
    assert "<tr><td>moe_top_k</td><td>2</td></tr>" in content
    assert "<td>load</td>" not in content  # of no value
    # Nothing is fetched: addresses are names of XML vocabularies only.
    outside = [word for word in content.split('"') if word.startswith(("http", "//"))]
    vocabularies = {"www.w3.org", "purl.org", "creativecommons.org"}
    assert {word.split("/")[2] for word in outside} <= vocabularies
    assert "<script" not in content
    assert len(content) < 1_500_000


def test_runs_side_by_side(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        config = {"seed": seed, "moe_top_k": 2}
        write(
            tmp_path / name, ("start", {"iteration": 0, "config": config}),
            interval(1, [4.0 + seed], [1.0 + seed]),
        )  # fmt: skip
    text, picture, page = report([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert (picture.name, page.name) == ("comparison.png", "comparison.html")
    assert "a:\n  iterations: 1 to 1" in text
    content = page.read_text()
    assert "<tr><th></th><th>a</th><th>b</th></tr>" in content
    assert "<tr><td>training loss</td><td>5.0000 -&gt; 5.0000</td><td>6.0000 -&gt;" in content
    assert "<h2>Configuration, where it differs</h2>" in content
    assert "<td>seed</td><td>1</td><td>2</td>" in content
    assert "moe_top_k" not in content  # the same in both
    assert "b: Load of every expert" in content
    named = re.findall(' id="([^"]*)"', content)
    assert len(named) == len(set(named))  # though it holds many pictures
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', content)) <= set(named)


def test_a_run_that_is_named_twice_is_drawn_once(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    write(tmp_path / "run", ("start", {"iteration": 0}), interval(1, [4.0]))
    assert main(["report", str(tmp_path / "run"), f"{tmp_path}/run/../run"]) == 0
    assert f"picture: {tmp_path / 'run' / 'loss.png'}" in capsys.readouterr().out


def test_steps_and_experts_are_counted_in_whole_numbers(tmp_path):
    write(tmp_path, ("start", {"iteration": 0}), *(interval(i, [4.0], [1.0]) for i in (1, 2, 3)))
    curves = read_curves(tmp_path)
    for axis in figure_of(panels_of([curves]), [curves], 10.0).axes[:5]:
        assert [tick for tick in axis.get_xticks() if tick % 1] == []


def test_the_only_step_is_at_a_whole_number(tmp_path):
    write(tmp_path, ("start", {"iteration": 0}), interval(1, [4.0]))
    curves = read_curves(tmp_path)
    for axis in figure_of(panels_of([curves]), [curves], 8.0).axes[:3]:
        assert [tick for tick in axis.get_xticks() if tick % 1] == []
        assert 1 in axis.get_xticks()


def test_names_of_many_runs_stay_inside_their_panel(tmp_path):
    folders = [tmp_path / f"run-{n}" for n in range(14)] + [tmp_path / f"{'y' * 90}-lr3"]
    for n, folder in enumerate(folders):
        folder.mkdir()
        losses = [5.0 + n, math.nan if n > 11 else 4.0]
        write(folder, ("start", {"iteration": 0}), interval(2, losses), valid(2, 4.5))
    runs = [read_curves(folder) for folder in folders]
    panels = panels_of(runs)
    figure = figure_of(panels, runs, 2.9 * len(panels))
    FigureCanvasAgg(figure).draw()
    for axis in figure.axes[: len(panels)]:
        legend, frame = axis.get_legend().get_window_extent(), axis.get_window_extent()
        assert frame.x0 <= legend.x0 <= legend.x1 <= frame.x1
        assert frame.y0 <= legend.y0 <= legend.y1 <= frame.y1
        names = [text.get_text() for text in axis.get_legend().get_texts()]
        assert len(names) == len(set(names))
        assert any(name.startswith("y") and name.endswith("-lr3") for name in names)
        lines = [line for line in axis.lines if line.get_label() in names]
        assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(names)


def test_long_names_that_differ_in_the_middle_are_told_apart(tmp_path):
    folders = [tmp_path / f"{'y' * 60}{n}{'y' * 60}" for n in range(2)]
    for folder in folders:
        folder.mkdir()
        write(folder, ("start", {"iteration": 0}), interval(1, [4.0], [1.0]))
    _, _, page = report(folders, tmp_path / "out")
    content = page.read_text()
    named = re.findall(' id="([^"]*)"', content)
    assert len(named) == len(set(named))
    for folder in folders:
        assert f">{folder.name}<" in content.partition("<svg")[2].replace("> ", ">")


@pytest.mark.parametrize("worst", [12.0, 40.0, 1000.0])
def test_perplexities_beside_the_axis_do_not_touch(tmp_path, worst):
    """Of a loss that jumped once all of them stood in one place."""
    write(tmp_path, ("start", {"iteration": 0}), interval(3, [9.0, worst, 4.0]))
    curves = read_curves(tmp_path)
    figure = figure_of(panels_of([curves]), [curves], 8.7)
    FigureCanvasAgg(figure).draw()
    (right,) = figure.axes[0].child_axes
    boxes = sorted(
        (text.get_window_extent() for text in right.get_yticklabels()), key=lambda box: box.y0
    )
    assert boxes
    assert all(below.y1 <= above.y0 for below, above in itertools.pairwise(boxes))


def test_the_picture_has_the_numbers_of_the_log(tmp_path):
    losses = [valid(iteration, loss) for iteration, loss in ((10, 3.5), (9, 4.0))]
    loads = (interval(9, [4.0], [1.5, 3.0]), interval(10, [3.0], [2.0, 1.25]))
    write(tmp_path, ("start", {"iteration": 0}), *loads, *losses)
    curves = read_curves(tmp_path)
    figure = figure_of(panels_of([curves]), [curves], 10.0)
    axes = {axis.get_title() or axis.get_title("left"): axis for axis in figure.axes}
    fullest, every = (
        next(axis for title, axis in axes.items() if what in title).collections[0].get_array()
        for what in ("fullest expert", "every expert")
    )
    assert fullest.tolist() == [[1.5, 2.0], [3.0, 1.25]]
    assert every.tolist() == [pytest.approx([load, *[(4 - load) / 3] * 3]) for load in (2.0, 1.25)]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert drawn == {"training": [[9, 4], [10, 3]], "validation": [[9, 4], [10, 3.5]]}


def axis_of_gradients(folder, norms):
    """As it is drawn, of a run with these norms."""
    events = [interval(i, [4.0], [1.0]) for i in (1, 2)]
    for (_, event), norm in zip(events, norms, strict=True):
        event["grad_norm"] = norm
    write(folder, ("start", {"iteration": 0}), *events)
    curves = read_curves(folder)
    figure = figure_of(panels_of([curves]), [curves], 10.0)
    FigureCanvasAgg(figure).draw()
    return next(axis for axis in figure.axes if axis.get_ylabel() == "gradient norm")


@pytest.mark.filterwarnings("error")
def test_gradients_that_are_zero_have_a_place(tmp_path):
    axis = axis_of_gradients(tmp_path, (0.0, 0.0))
    low, high = axis.get_ylim()
    assert low < 0 < high
    assert axis.lines[0].get_ydata().tolist() == [0, 0]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("norms", [(0.95, 0.99), (0.7, 1.3), (0.3, 4.0), (2e-3, 5e3), (1.0, 1.0)])
def test_a_number_beside_an_axis_is_the_one_that_stands_there(tmp_path, norms):
    """In full: of gradient norms within a tenth, `1e+00` stood beside each line."""
    axis = axis_of_gradients(tmp_path, norms)
    low, high = axis.get_ylim()
    places = [*axis.get_yticks(), *axis.get_yticks(minor=True)]
    labels = [tick.get_text() for which in (False, True) for tick in axis.get_yticklabels(which)]
    numbers = {label: place for label, place in zip(labels, places, strict=True) if label}
    numbers = {label: place for label, place in numbers.items() if low <= place <= high}
    assert numbers
    for label, place in numbers.items():
        assert float(label.replace(",", "")) == pytest.approx(place)
        assert "e" not in label


@pytest.mark.parametrize("norms", [(4e4, 2e5), (1e6, 1e6), (1e-9, 3e13)], ids=str)
def test_of_large_gradients_the_axis_keeps_its_name(tmp_path, norms):
    """Numbers like 10,000,000 pushed it off the picture."""
    axis = axis_of_gradients(tmp_path, norms)
    low, high = axis.get_ylim()
    numbers = [
        tick.label1 for tick in axis.yaxis.get_major_ticks() if low <= tick.get_loc() <= high
    ]
    assert any(number.get_text() for number in numbers)
    for text in (axis.yaxis.label, *numbers):
        assert text.get_window_extent().x0 >= 0, text
        value = text.get_text().replace(",", "")
        assert text is axis.yaxis.label or float(value) == pytest.approx(text.get_position()[1])


def test_a_level_line_of_speed_is_not_the_frame(tmp_path):
    events = [interval(i, [4.0], [1.0]) for i in (1, 2)]
    for i, (_, event) in enumerate(events):
        event["tokens_per_s"] = 50_000.0 + i
    write(tmp_path, ("start", {"iteration": 0}), *events)
    curves = read_curves(tmp_path)
    axis = figure_of(panels_of([curves]), [curves], 10.0).axes[1]
    (line,) = axis.lines
    low, high = axis.get_ylim()
    assert low == 0
    assert max(line.get_ydata()) < 0.99 * high


def test_steps_without_a_number_leave_no_gap_in_a_long_run(tmp_path):
    """Of a stretch of three steps those count that have one: as of losses that fp16 overflowed."""
    losses = [float(step) if step % 3 or step > 2990 else None for step in range(1, 3001)]
    losses[:3] = [None] * 3
    write(tmp_path, ("start", {"iteration": 0}), interval(3000, losses))
    curves = read_curves(tmp_path)
    (line,) = figure_of(panels_of([curves]), [curves], 10.0).axes[0].lines
    drawn = dict(line.get_xydata().tolist())
    assert len(drawn) == 1000
    assert math.isnan(drawn.pop(3))
    assert {at - loss for at, loss in drawn.items()} == {1.0, 1.5}


def test_markup_in_a_name_stays_text(tmp_path):
    folder = tmp_path / "<b>&"
    folder.mkdir()
    write(folder, ("start", {"iteration": 0}), interval(1, [4.0]))
    page = tmp_path / "report.html"
    write_page([read_curves(folder)], page)
    content = page.read_text()
    assert "<b>&" not in content
    assert "&lt;b&gt;&amp;" in content


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", ["_mine", "$x_{$", "a$b$", "$$"])
def test_a_name_is_drawn_as_it_is(tmp_path, name):
    for folder in (tmp_path / name, tmp_path / "other"):
        folder.mkdir()
        write(folder, ("start", {"iteration": 0}), interval(1, [4.0], [1.0]))
    _, _, page = report([tmp_path / name, tmp_path / "other"], tmp_path / "out")
    assert f">{name}<" in page.read_text().replace("> ", ">")
    assert f"{name}: Load of every expert" in page.read_text()


def test_a_name_that_is_no_text_is_spelled_out(tmp_path, monkeypatch):
    """Linux lets it be any bytes; Python has half a surrogate pair for each that is no UTF-8."""
    monkeypatch.chdir(tmp_path)
    folders = [Path("a\udcff"), Path("b") / "a\udcff"]
    for folder in folders:
        try:
            folder.mkdir(parents=True)
        except (OSError, UnicodeEncodeError):
            pytest.skip("this file system has no such names")
        write(folder, ("start", {"iteration": 0}), interval(1, [4.0]))
    assert read_curves(folders[0]).name == "a\\udcff"
    _, _, page = report(folders, Path("out"))
    assert "<th>a\\udcff</th><th>b/a\\udcff</th>" in page.read_text().replace("b\\", "b/")


@pytest.mark.parametrize("there", [False, True])
def test_letters_that_matplotlibs_font_lacks_are_of_another_if_it_is_there(
    tmp_path, monkeypatch, there
):
    """Chinese ones need a font that few machines have; STIX, with this letter, comes with it."""
    monkeypatch.setattr(fonts, "FURTHER", ["No Such Font", *["STIXGeneral"] * there])
    runs = []
    for name in ("\N{LATIN SMALL LETTER D WITH PALATAL HOOK}", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, ("start", {"iteration": 0}), interval(2, [5.0, 4.0]))
        runs.append(read_curves(tmp_path / name))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        FigureCanvasAgg(figure_of(panels_of(runs)[:1], runs, 3.0)).draw()
    assert any("missing from font" in str(one.message) for one in said) != there


def test_what_a_log_tells_does_not_command_the_terminal(tmp_path, capsys):
    told = {"iteration": 1, "place": "", "\x1b]0;a\x07\u202e\t": 0.5}
    write(tmp_path, ("start", {"iteration": 0}), interval(1, [4.0]), ("measured", told))
    assert main(["report", str(tmp_path)]) == 0
    assert "\\x1b]0;a\\x07\\u202e\t: 0.5000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("train", {"lm_losses": ["a"]}),
        ("train", {"lm_losses": [10**400]}),
        ("train", {"tokens_per_s": "a"}),
        ("train", {"iteration": 10**30}),
        ("train", {"load_imbalance": [["a"]]}),
        ("train", {"load_imbalance": [1.0, 1.0]}),
        ("train", {"tokens_per_expert": [["a"]]}),
        ("train", {"tokens_per_expert": [[1], [1, 2]]}),
        ("start", {"iteration": "a"}),
        ("start", {"notes": [None]}),
        ("train", {"tokens_per_expert": [[1.0, None]]}),
        ("start", {"config": ["a"]}),
        ("eval", {"lm_loss": "a"}),
        ("measured", {"recall": "a"}),
        ("profile", {"step_ms": 0.0, "kinds": {"a": {"busy": 1.0, "alone": 1.0}}}),
    ],
)
def test_an_event_of_no_numbers_is_named(tmp_path, kind, wrong):
    event = interval(1, [4.0], [1.0])[1] | {"place": "", **wrong}
    write(tmp_path, interval(1, [4.0], [1.0]), (kind, event))
    with pytest.raises(ValueError, match=f"holds an event '{kind}' that"):
        read_curves(tmp_path)


def test_an_evaluation_that_is_no_number(tmp_path):
    write(tmp_path, ("start", {"iteration": 0}), interval(2, [3.0, 4.0]), valid(2, float("nan")))
    told = dict(summary(read_curves(tmp_path)))
    assert told["validation loss"] == "not a number at iteration 2"


def test_a_place_that_takes_no_report_is_said(tmp_path):
    write(tmp_path, ("start", {"iteration": 0}), interval(1, [4.0]))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"into .*file: File exists. Name .* --output"):
        report([tmp_path], tmp_path / "file")


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="to be a run folder with a"):
        read_curves(tmp_path)
    write(tmp_path, ("start", {"iteration": 0}))
    with pytest.raises(ValueError, match="holds no training step yet"):
        draw(tmp_path)
    write(tmp_path, ("train", {"iteration": 3}))
    with pytest.raises(ValueError, match="an event 'train' that this mb-train cannot read"):
        draw(tmp_path)


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write(tmp_path, ("start", {"iteration": 0}), interval(2, [5.0, 4.0]))
    for words in ([], ["--frontier"]):
        assert main(["report", str(tmp_path), *words]) == 2
        assert "Install it with pip install matplotlib." in capsys.readouterr().err
