#!/usr/bin/env python3
"""Shows the flight records of ranks: the collectives in which they differ or that are not complete.

    tessera flight [--trace NAME] FOLDER [RANK...]

FOLDER has the records, rank_0.json, rank_1.json and so on, that ranks write to TESSERA_FLIGHT_DIR on a timeout, an error and
SIGUSR1; without RANK, all of them are read. Also writes FOLDER/NAME.json, a trace for chrome://tracing. The exit status is 1
if there is no record that can be read, or the trace can't be written. `tessera run` calls this when a job has failed.
"""
import argparse
import collections
import json
import os
import re
import stat
import sys

# A rank's records are bounded in the library; a file of another origin is not.
MOST_BYTES, MOST_ENTRIES, LONGEST_TEXT, MOST_RANKS = 16 << 20, 20000, 2000, 1 << 20
TABLE_WIDTH, SUBJECT_WIDTH, STEP_WIDTH, STATE_WIDTH, STATES_IN_A_LINE = 120, 31, 14, 15, 4
# Rows shown at each end of a channel's rows: the hang is at the first, the news at the last.
ROWS_AT_AN_END = 5
RANKS_DESCRIBED = 8

# What is known of a collective on one rank.
DONE, WAITING, NOT_ISSUED = "done", "waiting", "not issued"
OTHER = "other, below"  # another collective than that of most ranks
PAST = "past"  # so long ago that the record does not hold it any more
NO_MEMBER = "-"  # the rank has no record of that process group
TROUBLE = (WAITING, NOT_ISSUED, OTHER)

Cell = collections.namedtuple("Cell", "state entry waited", defaults=(None, 0))
Row = collections.namedtuple("Row", "usual cells")  # `usual`: the entry of most ranks
Section = collections.namedtuple("Section", "title rows left_out")


def read_bounded(path):
    """Returns the bytes of a file. Whatever it is (a pipe, a link), this returns or throws."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no plain file")
        if status.st_size > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES} bytes, got {status.st_size}")
        return file.read(MOST_BYTES)


def checked(source, texts, numbers, needed):
    """Returns the fields of a JSON object; those that are missing and not needed are empty or 0."""
    if not isinstance(source, dict):
        raise ValueError("expected an object")
    for name in needed:
        if name not in source:
            raise ValueError(f"it has no \"{name}\"")
    fields = {name: source.get(name, "") for name in texts} | {name: source.get(name, 0) for name in numbers}
    for name, value in fields.items():
        if type(value) is not (str if name in texts else int):
            raise ValueError(f"\"{name}\" is no {'text' if name in texts else 'number'}")
    return fields | {name: fields[name][:LONGEST_TEXT] for name in texts}


def entry_of(source):
    entry = checked(source, ("group", "channel", "collective", "subject", "text", "phase"),
                    ("number", "bytes", "step", "issued_us"), ("number", "issued_us"))
    entry["completed_us"] = source.get("completed_us")
    if type(entry["completed_us"]) not in (int, type(None)):
        raise ValueError("\"completed_us\" is no number")
    entry["name"] = f"{entry['collective']} of {entry['subject']}" if entry["subject"] else entry["collective"]
    return entry


def read_record(path, rank):
    """Returns the record of a rank."""
    try:
        source = json.loads(read_bounded(path))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError("it is no JSON text") from None
    record = checked(source, ("host", "reason", "phase"), ("rank", "size", "step", "written_us"), ("rank", "size", "records"))
    if not 0 <= record["rank"] < record["size"] <= MOST_RANKS:
        raise ValueError(f"there is no rank {record['rank']} of {record['size']}")
    if record["rank"] != rank:
        raise ValueError(f"it is that of rank {record['rank']}")
    if not isinstance(source["records"], list):
        raise ValueError("\"records\" is no list")
    return record | {"entries": [entry_of(entry) for entry in source["records"][-MOST_ENTRIES:]]}


def one_line(text, width=TABLE_WIDTH):
    """Returns a line of at most `width` characters; the end of a longer text is replaced by "..."."""
    text = re.sub(r"[\0-\x1f\x7f]", " ", text)
    return text if len(text) <= width else text[:width - 3] + "..."


def rank_list(ranks):
    """Returns "rank 3" or "ranks 0-2, 5" for ascending ranks."""
    runs = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def seconds_text(seconds):
    return f"{seconds:.1f} s" if seconds < 1000 else f"{seconds:.0f} s"


def cell_of(entry, usual, record):
    waited = 0 if entry["completed_us"] is not None else max(0, (record["written_us"] - entry["issued_us"]) * 1e-6)
    if entry["text"] != usual["text"]:
        return Cell(OTHER, entry, waited)
    return Cell(DONE if entry["completed_us"] is not None else WAITING, entry, waited)


def rows_of(records, group, numbered):
    """Yields the rows of a channel. `numbered`: by number, the entries by the indices of their records."""
    first = {}
    for number, entries in numbered:
        for i in entries:
            first.setdefault(i, number)
    is_member = [group == "world" or any(entry["group"] == group for entry in record["entries"]) for record in records]
    for number, entries in numbered:
        text = collections.Counter(entry["text"] for entry in entries.values()).most_common(1)[0][0]
        usual = next(entry for entry in entries.values() if entry["text"] == text)
        cells = []
        for i, record in enumerate(records):
            if i in entries:
                cells.append(cell_of(entries[i], usual, record))
            elif not is_member[i]:
                cells.append(Cell(NO_MEMBER))
            else:
                cells.append(Cell(PAST if first.get(i, -1) > number else NOT_ISSUED))
        yield Row(usual, cells)


def sections_of(records):
    """Returns, for each channel with trouble, the rows from the one before it on, without the middle of many."""
    channels = collections.defaultdict(lambda: collections.defaultdict(dict))
    for i, record in enumerate(records):
        for entry in record["entries"]:
            channels[entry["group"], entry["channel"]][entry["number"]][i] = entry
    sections = []
    for (group, channel), numbered in sorted(channels.items()):
        rows = list(rows_of(records, group, sorted(numbered.items())))
        trouble = [i for i, row in enumerate(rows) if any(cell.state in TROUBLE for cell in row.cells)]
        if not trouble:
            continue
        rows = rows[max(trouble[0] - 1, 0):]
        left_out = max(len(rows) - 2 * ROWS_AT_AN_END, 0)
        del rows[ROWS_AT_AN_END:ROWS_AT_AN_END + left_out]
        sections.append(Section(f"process group {group}, channel {channel}", rows, left_out))
    return sections


def columns_of(sections, count):
    """Returns lists of the records with the same states in all rows."""
    columns = collections.defaultdict(list)
    for i in range(count):
        cells = [row.cells[i] for section in sections for row in section.rows]
        columns[tuple((cell.state, cell.state == OTHER and cell.entry["text"]) for cell in cells)].append(i)
    return list(columns.values())


def line_of(number, subject, step, states):
    widths = (7, SUBJECT_WIDTH, STEP_WIDTH, *[STATE_WIDTH] * len(states))
    return "  " + " ".join(one_line(text, w).ljust(w) for text, w in zip((number, subject, step, *states), widths)).rstrip(" ")


def row_lines(row, records, columns):
    states = []
    for column in columns:
        state = row.cells[column[0]].state
        waited = max(row.cells[i].waited for i in column)
        states.append(f"waiting {seconds_text(waited)}" if state == WAITING else state)
    usual = row.usual
    yield line_of(f"#{usual['number']}", usual["name"], f"{usual['step']} {usual['phase']}", states)
    for column in columns:
        cell = row.cells[column[0]]
        if cell.state == OTHER:
            end = "done" if cell.entry["completed_us"] is not None else f"waiting {seconds_text(cell.waited)}"
            ranks = rank_list([records[i]["rank"] for i in column])
            yield one_line(f"          {ranks}: other: {cell.entry['text']}, {end}")


def page_lines(records, sections, columns):
    """Yields the lines of one table: a few columns of all sections."""
    yield line_of("number", "collective", "step, phase", [rank_list([records[i]["rank"] for i in c]) for c in columns])
    for section in sections:
        yield one_line(f"  {section.title}:")
        for i, row in enumerate(section.rows):
            if section.left_out and i == ROWS_AT_AN_END:
                yield f"  ... {section.left_out} more ..."
            yield from row_lines(row, records, columns)


def table_lines(records):
    """Yields the lines of the table, at most 120 characters wide. Ranks with the same states share a column."""
    for record in records[:RANKS_DESCRIBED]:
        phase = f", {record['phase']}" if record["phase"] else ""
        yield one_line(f"  rank {record['rank']}: step {record['step']}{phase}: {record['reason']}")
    if len(records) > RANKS_DESCRIBED:
        yield f"  ... {len(records) - RANKS_DESCRIBED} more ranks ..."
    present = {record["rank"] for record in records}
    missing = [rank for rank in range(records[0]["size"]) if rank not in present][:1000]
    if missing:
        yield one_line(f"  no record of {rank_list(missing)}")
    sections = sections_of(records)
    if not sections:
        yield "  these ranks have completed the same collectives"
        return
    columns = columns_of(sections, len(records))
    for first in range(0, len(columns), STATES_IN_A_LINE):
        yield from page_lines(records, sections, columns[first:first + STATES_IN_A_LINE])


def events_of(record):
    """Yields the events of a rank in a Chrome trace: a process, with a thread for each of its channels."""
    rank = {"pid": record["rank"]}
    name = f"rank {record['rank']}" + (f" on {record['host']}" if record["host"] else "")
    yield rank | {"ph": "M", "name": "process_name", "tid": 0, "args": {"name": name}}
    yield rank | {"ph": "M", "name": "process_sort_index", "tid": 0, "args": {"sort_index": record["rank"]}}
    threads = sorted({(entry["group"], entry["channel"]) for entry in record["entries"]})
    for tid, names in enumerate(threads, 1):
        yield rank | {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": " ".join(names)}}
    for entry in record["entries"]:
        completed = entry["completed_us"] is not None
        end = entry["completed_us"] if completed else record["written_us"]
        yield rank | {"ph": "X", "name": entry["name"], "cat": entry["collective"],
                      "tid": threads.index((entry["group"], entry["channel"])) + 1, "ts": entry["issued_us"],
                      "dur": max(0, end - entry["issued_us"]),
                      "args": {name: entry[name] for name in ("number", "step", "phase", "bytes", "text")} |
                              {"completed": completed}}
    yield rank | {"ph": "i", "name": record["reason"], "s": "p", "tid": 0, "ts": record["written_us"],
                  "args": {"step": record["step"], "phase": record["phase"]}}


def write_trace(path, records):
    trace = {"displayTimeUnit": "ms", "traceEvents": [event for record in records for event in events_of(record)]}
    draft = path + ".draft"
    with open(draft, "w", encoding="utf-8", errors="replace") as file:
        file.write(json.dumps(trace, ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n")
    os.replace(draft, path)


def ranks_in(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [int(match[1]) for name in names if (match := re.fullmatch(r"rank_(\d+)\.json", name))]


def main():
    parser = argparse.ArgumentParser(prog="tessera flight", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", metavar="FOLDER", help="the folder with the records")
    parser.add_argument("ranks", metavar="RANK", nargs="*", type=int, help="read only those of these ranks")
    parser.add_argument("--trace", metavar="NAME", default="flight", help="the name of the trace (default flight)")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    ranks = sorted(arguments.ranks or ranks_in(arguments.folder))
    if not ranks:
        print(f"tessera flight: no flight records in '{arguments.folder}'", file=sys.stderr)
    records = []
    for rank in ranks:
        path = f"{arguments.folder}/rank_{rank}.json"
        try:
            records.append(read_record(path, rank))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            print(f"cannot read the flight record '{path}': {one_line(reason, 200)}")
    if not records:
        return 1
    print("the last collectives, by the flight records:", *table_lines(records), sep="\n")
    trace = f"{arguments.folder}/{arguments.trace}.json"
    try:
        write_trace(trace, records)
    except OSError as error:
        print(f"cannot write '{trace}': {error.strerror}")
        return 1
    print(f"all recorded collectives, for chrome://tracing: {trace}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
