#!/usr/bin/env python3
"""Draws pictures of measurements and of training runs, as SVG that is light or dark as the page is.

    pictures.py docs [ROOT]
    pictures.py training DIR
    pictures.py step FLIGHT_RECORD [ROOT]

docs: draws docs/figures/NAME.json as docs/pictures/NAME.svg, for each NAME in FIGURES whose file exists; a second call writes the
same bytes. training: draws DIR/metrics.csv, which train_gpt --save DIR writes, as DIR/training.svg. step: takes the last whole step of
a rank_N.json, which ranks write on SIGUSR1, into docs/figures/overlap.json. Needs matplotlib.
"""
import csv
import html
import itertools
import json
import pathlib
import re
import sys

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator, NullLocator
except ImportError:
    sys.exit("pictures.py needs matplotlib: python3 -m pip install matplotlib")

INK = "#1a1a1a"  # becomes the color of text, by STYLE
BLUE, RED, GREEN, CYAN, GREY = "#4477aa", "#cc4455", "#228833", "#66bbdd", "#999999"  # seen on light and on dark
STYLE = """<style>
svg { background: #ffffff; color: #1a1a1a; }
@media (prefers-color-scheme: dark) { svg { background: #16181c; color: #e8e8e8; } }
</style>
"""
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "tessera", "font.family": ["DejaVu Sans"], "font.size": 11, "text.color": INK,
            "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.linewidth": 0.8,
            "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.facecolor": "none",
            "axes.titlesize": 12, "axes.titleweight": "bold", "figure.facecolor": "none", "grid.color": INK, "grid.alpha": 0.15,
            "xtick.labelsize": 11, "ytick.labelsize": 11, "axes.labelsize": 11, "legend.fontsize": 11, "legend.frameon": False}


class Picture:
    """A figure whose places are pixels from its top left. The lines below its title are the data's notes and date."""
    def __init__(self, height, title, data):
        matplotlib.rcParams.update(SETTINGS)
        self.width, self.height, self.title = 900, height, title
        self.figure = Figure(figsize=(self.width / 72, height / 72), dpi=72)
        self.text(16, 28, title, fontsize=15, fontweight="bold")
        *notes, last = data.get("notes") or [""]
        for i, note in enumerate([*notes, f"{last} {data.get('date', '')}"]):
            self.text(16, 48 + 17 * i, note, alpha=0.75)

    def text(self, x, y, text, **settings):
        self.figure.text(x / self.width, 1 - y / self.height, text, **settings)

    def panel(self, left, top, width, height, title="", grid="x"):
        axes = self.figure.add_axes([left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height])
        axes.set_title(title, loc="left", pad=8)
        axes.grid(axis=grid)
        axes.tick_params(length=0)
        axes.spines["left" if grid == "x" else "bottom"].set_visible(False)
        return axes

    def legend(self, x, y, *handles):
        self.figure.legend(handles=handles, loc="center left", bbox_to_anchor=(x / self.width, 1 - y / self.height), ncols=len(handles),
                           borderaxespad=0, borderpad=0, handletextpad=0.5, columnspacing=1.6)

    def save(self, path):
        self.figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        text = path.read_text().replace("'DejaVu Sans'", "system-ui, sans-serif").replace(INK, "currentColor")
        text = re.sub(r'(<svg [^>]*?)width="([\d.]+)pt" height="([\d.]+)pt"([^>]*>\n)',
                      rf'\1width="\2" height="\3"\4<title>{html.escape(self.title)}</title>\n{STYLE}', text, count=1)
        path.write_text("\n".join(line.rstrip() for line in text.split("\n")))


def rows_of(axes, labels):
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def logarithmic(axes, ticks, low, high):
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def label(axes, x, y, text):
    axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center")


def dot(axes, y, ratio, color, marker="o", size=7):
    """Draws [median, least, most], or a number alone, in a row."""
    axes.plot(ratio[1:], [y] * len(ratio[1:]), color=color, linewidth=1.5)
    axes.plot(ratio[0], y, marker=marker, color=color, markersize=size, linestyle="none")


def key(text, color, marker="o", **settings):
    return Line2D([], [], color=color, marker=marker, linestyle="none", label=text, **{"markersize": 7} | settings)


def span(values, digits=1):
    values = list(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def millions(data, size):
    return f"{data['parameters'][size] / 1e6:.1f} M"


def draw_step_time(data):
    def of(peer):
        return [row["ratios"][peer][0] for row in data["rows"]]

    picture = Picture(420, f"A step of FSDP2 takes {span(of('FSDP2'))} times as long as Tessera's, one of DDP {span(of('DDP'), 2)}", data)
    picture.legend(560, 65, Patch(color=BLUE, label="above 1: Tessera is faster"), Patch(color=RED, label="below: the other is"))
    for i, (transport, title) in enumerate([("arena", "Tessera over shared memory (arena)"), ("Gloo", "Tessera over Gloo")]):
        axes = picture.panel(56 + 430 * i, 110, 400, 250, title, "y")
        ticks = {}
        for j, row in enumerate(row for row in data["rows"] if row["transport"] == transport):
            for k, (peer, (median, least, most)) in enumerate(row["ratios"].items()):
                x = k + 0.42 * (j - 0.5)
                axes.bar(x, median, 0.38, color=BLUE if median >= 1 else RED)
                axes.plot([x, x], [least, most], color=INK, linewidth=1.5)
                axes.text(x, max(most, 1) + 0.02, f"{median:.2f}", ha="center")
                axes.text(k, -0.16, peer if j == 0 else "", ha="center", va="top", fontweight="bold")
                ticks[x] = millions(data, row["size"])
        axes.set_xticks(list(ticks), ticks.values(), fontsize=10)
        axes.axhline(1, color=INK, linewidth=1.5)
        axes.set_ylim(0, 1.75)
        axes.set_yticks([0, 0.5, 1, 1.5], ["0", "0.5", "1", "1.5"] if i == 0 else [])
    return picture


def draw_memory(data):
    share = max(row["mib"]["Tessera"] / row["mib"]["DDP"] for row in data["rows"])
    picture = Picture(290, f"Each of two ranks keeps {100 * share:.0f} % of what it keeps under DDP", data)
    for i, row in enumerate(data["rows"]):
        axes = picture.panel(96 + 430 * i, 110, 330, 130, f"GPT, {millions(data, row['size'])} parameters")
        for y, (system, mib) in enumerate(row["mib"].items()):
            axes.barh(y, mib, 0.7, color=BLUE if system == "Tessera" else GREY)
            label(axes, mib, y, mib)
        rows_of(axes, list(row["mib"]))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel("MiB")
    return picture


def formula(level, ranks, transport):
    """Returns the kept bytes that docs/performance.md expects, by those of the parameters, and their formula."""
    if level == "none":
        return 4, "4P"
    return (1 + 3 / ranks, "P + 3P/N") if transport == "Gloo" and level in ("os", "os_g") else (4 / ranks, "4P/N")


def draw_levels(data):
    kinds = {("none", 1, ""): data["one_process_mb"]}
    for row in data["rows"]:
        kinds.setdefault((row["level"], row["ranks"], row["transport"]), {})[row["size"]] = row["kept_mb"]
    kinds = dict(sorted(kinds.items(), key=lambda item: (item[0][1], -formula(*item[0])[0], item[0])))
    expected = {kind: {size: formula(*kind)[0] * 4e-6 * data["parameters"][size] for size in kept} for kind, kept in kinds.items()}
    off = max(abs(mb - expected[kind][size]) for kind, kept in kinds.items() for size, mb in kept.items())
    picture = Picture(350, f"A rank keeps as much as the formulas say, to {off:.1f} MB", data)
    for i, size in enumerate(data["parameters"]):
        axes = picture.panel(256 + 214 * i, 110, 180, 190, f"{size}, {millions(data, size)}")
        for y, (kind, kept) in enumerate(kinds.items()):
            if size in kept:
                axes.barh(y, kept[size], 0.7, color=GREY if kind[0] == "none" else BLUE)
                axes.plot([expected[kind][size]] * 2, [y - 0.45, y + 0.45], color=INK, linewidth=2)
                label(axes, kept[size], y, kept[size])
        names = ["one process" if level == "none" else f"{level}, {ranks} ranks, {transport}" for level, ranks, transport in kinds]
        rows_of(axes, [f"{name}: {formula(*kind)[1]}" if i == 0 else "" for name, kind in zip(names, kinds)])
        axes.set_xlim(0, 1.2 * data["one_process_mb"][size])
        axes.set_xlabel("MB")
    return picture


def draw_links(data):
    def of(mbit):
        return [row["by_limit"][0] for row in data["rows"] if row["mbit"] == mbit]

    levels = ["none", "os", "os_g", "p_g_os"]
    looks = {("small", 1): (BLUE, "o"), ("small", 2): (BLUE, "s"), ("medium", 1): (RED, "o"), ("medium", 2): (RED, "s")}
    picture = Picture(370, f"A step takes {span(of(100), 2)} times the limit at 100 Mbit/s, {span(of(1000), 2)} at 1 Gbit/s", data)
    picture.legend(16, 88, *(key(f"{millions(data, size)}, {ranks} rank{'s' * (ranks > 1)} a host", *look)
                             for (size, ranks), look in looks.items()))
    for i, mbit in enumerate((100, 1000)):
        axes = picture.panel(70 + 420 * i, 130, 390, 190, ["100 Mbit/s", "1 Gbit/s"][i])
        for row in data["rows"]:
            if row["mbit"] == mbit:
                kind = row["size"], row["ranks_per_host"]
                dot(axes, levels.index(row["level"]) + 0.18 * (list(looks).index(kind) - 1.5), row["by_limit"], *looks[kind])
        rows_of(axes, levels if i == 0 else [""] * len(levels))
        axes.axvline(1, color=INK, linewidth=1.5)
        axes.set_xlim(0.985, 1.42)
        axes.set_xticks([1, 1.1, 1.2, 1.3, 1.4])
        axes.set_xlabel("step / limit")
    return picture


def draw_faults(data):
    looks = {"arena": (BLUE, "o", -0.15), "gloo": (RED, "s", 0.15)}
    cells = [(row["goal"], row[transport]) for row in data["rows"] for transport in looks]
    named, late = sum(cell["named_percent"] == 100 for _, cell in cells), sum(cell["worst"] > goal for goal, cell in cells)
    groups = {"dead": "A rank dies", "stuck": "A rank is stuck", "mismatch": "A rank does something else", "init": "In init()"}
    lines = [line for group, name in groups.items() for line in [name] + [row for row in data["rows"] if row["group"] == group]]
    picture = Picture(140 + 19 * len(lines),
                      f"All survivors name the culprit in {named} of {len(cells)} cases; in {late} the worst is beyond the goal", data)
    picture.legend(270, 75, key("arena", BLUE), key("Gloo", RED, "s"), key("goal", INK, "|", markersize=12, markeredgewidth=2))
    picture.text(885, 85, "named by\n(arena / Gloo)", ha="right", fontweight="bold")
    axes = picture.panel(270, 95, 490, 19 * len(lines))
    rows_of(axes, [line if isinstance(line, str) else line["fault"] for line in lines])
    logarithmic(axes, [0.01, 0.1, 1, 10], 0.008, 20)
    axes.set_xlabel("seconds")
    for y, (line, tick) in enumerate(zip(lines, axes.get_yticklabels())):
        if isinstance(line, str):
            tick.set_fontweight("bold")
            continue
        axes.plot([line["goal"]] * 2, [y - 0.45, y + 0.45], color=INK, linewidth=2)
        for transport, (color, marker, shift) in looks.items():
            dot(axes, y + shift, [line[transport]["worst"]], color, marker, 6)
        shares = [line[transport]["named_percent"] for transport in looks]
        picture.text(885, 95 + 19 * (y + 0.5), "all" if min(shares) == 100 else " / ".join(f"{share} %" for share in shares),
                     ha="right", va="center", fontweight="normal" if min(shares) == 100 else "bold")
    return picture


def draw_checkpoints(data):
    def of(system, *kinds):
        return span(row[system][0] for row in data["rows"] if system in row and row["operation"].split(",")[0] in kinds)

    picture = Picture(370, f"DCP saves and loads in {of('DCP', 'save', 'load')} times Tessera's time, "
                      f"safetensors loads in {of('safetensors', 'load')}", data)
    picture.legend(400, 92, key("DCP", BLUE), key("safetensors", RED, "s"))
    axes = picture.panel(400, 110, 470, 210)
    for y, row in enumerate(data["rows"]):
        both = "DCP" in row and "safetensors" in row
        for system, look, shift in (("DCP", (BLUE, "o"), -0.17), ("safetensors", (RED, "s"), 0.17)):
            if system in row:
                dot(axes, y + shift * both, row[system], *look)
    rows_of(axes, [f"{row['operation']}, {row['ranks']} ranks ({row['tessera_s']:g} s)" for row in data["rows"]])
    axes.axvline(1, color=INK, linewidth=1.5)
    logarithmic(axes, [0.25, 0.5, 1, 2, 4, 8], 0.25, 8.5)
    axes.set_xlabel("time / Tessera's")
    return picture


def draw_losses(data):
    runs, colors = data["runs"], [RED, BLUE, GREEN, CYAN, INK]
    off = max((abs(a - b) for one, other in itertools.combinations(runs.values(), 2) for a, b in zip(one, other)), default=0)
    picture = Picture(400, f"The losses of {len(runs)} runs "
                      + (f"differ by at most {off:.1g}" if off else "are equal in all digits"), data)
    axes = picture.panel(64, 90, 806, 260, grid="y")
    handles = []
    for i, (name, losses) in enumerate(runs.items()):  # the first as a band, on which the dashes of the others take turns
        color, width = (GREY, 7) if i == 0 else (colors[(i - 1) % len(colors)], 2.5)
        dashes = (0, (4, 0)) if i == 0 or len(runs) == 2 else (4 * i, (4, 4 * (len(runs) - 2)))
        axes.plot(range(1, len(losses) + 1), losses, color=color, linewidth=width, linestyle=dashes, dash_capstyle="butt")
        handles.append(Line2D([], [], color=color, linewidth=width, label=name))
    axes.legend(handles=handles, loc="upper right")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    return picture


def step_of(record):
    """Returns when the collectives of a flight record's last whole step were issued and completed, in ms of it."""
    step = max(entry["step"] for entry in record["records"]) - 1
    entries = [entry for entry in record["records"] if entry["step"] == step and entry["completed_us"] and entry["phase"] != "user code"]
    start = min(entry["issued_us"] for entry in entries)
    return [{"channel": entry["channel"], "phase": entry["phase"], "units": entry["subject"], "megabytes": round(entry["bytes"] / 1e6, 2),
             "begin_ms": round((entry["issued_us"] - start) / 1e3, 2), "end_ms": round((entry["completed_us"] - start) / 1e3, 2)}
            for entry in sorted(entries, key=lambda entry: entry["issued_us"])]


def draw_overlap(data):
    spans = data["spans"]
    end = max(span["end_ms"] for span in spans)
    names = {"kParams": ("gathers of\nparameters", BLUE), "kGrads": ("reductions of\ngradients", RED), "kControl": ("agreements", GREEN)}
    picture = Picture(330, "Parameters and gradients are sent beside forward and backward", data)
    axes = picture.panel(110, 110, 770, 160)
    phases = {}
    for span in spans:
        phases.setdefault(span["phase"], span["begin_ms"])
    for (name, begin), last, shade in zip(phases.items(), [*list(phases.values())[1:], end], itertools.cycle((0.05, 0.12))):
        axes.axvspan(begin, last, color=INK, alpha=shade, linewidth=0)
        axes.text((begin + last) / 2, -0.62, name, ha="center", va="bottom")
    busy = {channel: [] for channel in names}  # a lane is a list of ends; spans that overlap lie in different ones
    for y, (channel, (_, color)) in enumerate(names.items()):
        of_channel = [span for span in spans if span["channel"] == channel]
        for span in of_channel:
            lanes = busy[channel]
            lane = next((i for i, until in enumerate(lanes) if until <= span["begin_ms"]), len(lanes))
            lanes[lane:lane + 1] = [span["end_ms"]]
            span["lane"] = lane
        height = 0.8 / max(1, len(busy[channel]))
        for span in of_channel:
            axes.barh([y - 0.4 + height * (span["lane"] + 0.5)], [span["end_ms"] - span["begin_ms"]], 0.86 * height, [span["begin_ms"]],
                      color=color)
    rows_of(axes, [name for name, _ in names.values()])
    axes.set_ylim(len(names) - 0.5, -0.65)
    axes.set_xlim(0, end)
    axes.set_xlabel("ms of the step")
    return picture


FIGURES = {"overlap": draw_overlap, "step_time": draw_step_time, "memory": draw_memory, "levels": draw_levels, "links": draw_links,
           "faults": draw_faults, "checkpoints": draw_checkpoints, "losses": draw_losses}
KEPT = {"parameters": BLUE, "gradients": CYAN, "optimizer state": GREEN}


def draw_training(rows):
    def column(name):
        """Returns the steps that have a value of the name, and the values."""
        found = [(int(row["step"]), float(row[name])) for row in rows if row.get("step") and row.get(name)]
        return [step for step, _ in found], [value for _, value in found]

    kept = [column(f"memory/{name}")[1][-1:] for name in [*KEPT, "unsharded parameters"]]
    (steps, losses), (_, unigram), (_, held_out) = column("loss"), column("unigram"), column("held_out")
    found = [("training", losses), ("held-out", held_out), ("unigram model", unigram)]
    picture = Picture(500 if all(kept) else 390, f"Loss after step {steps[-1] if steps else 0}: "
                      + (", ".join(f"{name} {values[-1]:.2f}" for name, values in found if values) or "none"), {})
    axes = picture.panel(64, 70, 816, 268, grid="y")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    drawn = axes.plot(steps, losses, color=BLUE, linewidth=1, label="training")
    drawn += axes.plot(*column("held_out"), color=RED, linewidth=2, marker="o", markersize=6, label="held-out")
    if unigram:
        drawn.append(axes.axhline(unigram[-1], color=INK, linewidth=1.5, linestyle=(0, (5, 3)), label="unigram model"))
    picture.legend(64, 50, *drawn)
    if all(kept):
        *shards, whole = [values[0] / 1e6 for values in kept]
        picture.text(16, 398, "Memory kept (MB)", fontsize=12, fontweight="bold")
        picture.legend(180, 394, *(Patch(color=color, label=name) for name, color in KEPT.items()))
        axes = picture.panel(104, 408, 700, 52)
        for y, values in enumerate((shards, [whole, whole, 2 * whole])):
            ends = list(itertools.accumulate(values, initial=0))
            axes.barh([y] * 3, values, 0.7, ends[:-1], color=KEPT.values())
            label(axes, ends[-1], y, f"{ends[-1]:.1f} MB")
        rows_of(axes, ["one rank", "one process"])
    return picture


def main():
    verb, *rest = sys.argv[1:] or [""]
    if verb == "training" and len(rest) == 1:
        folder = pathlib.Path(rest[0])
        if not (folder / "metrics.csv").exists():
            sys.exit(f"pictures.py: {folder} has no metrics.csv")
        with open(folder / "metrics.csv", newline="") as file:
            draw_training(list(csv.DictReader(file))).save(folder / "training.svg")
        print(folder / "training.svg")
    elif verb == "docs" and len(rest) <= 1:
        docs = pathlib.Path(rest[0] if rest else pathlib.Path(__file__).parent.parent) / "docs"
        (docs / "pictures").mkdir(exist_ok=True)
        for name, draw in FIGURES.items():
            if (docs / "figures" / f"{name}.json").exists():
                draw(json.loads((docs / "figures" / f"{name}.json").read_text())).save(docs / "pictures" / f"{name}.svg")
                print(f"docs/pictures/{name}.svg")
    elif verb == "step" and len(rest) in (1, 2):
        figure = pathlib.Path(rest[1] if len(rest) > 1 else pathlib.Path(__file__).parent.parent) / "docs/figures/overlap.json"
        known = json.loads(figure.read_text()) if figure.exists() else {}
        spans = step_of(json.loads(pathlib.Path(rest[0]).read_text()))
        figure.write_text(json.dumps(known | {"spans": spans}, indent=1) + "\n")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
