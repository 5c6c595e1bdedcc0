#!/usr/bin/env python3
"""Asks the search of the site what users ask, and checks that a page that answers comes first.

    check_search.py SITE

The index is that of the site, searched as its theme does: all words, where titles count a thousand times as much as texts, and
the weights of scripts/site_pages.py. Prints the questions that are answered by another page; the exit status is 1 if there is one.
"""
import json
import pathlib
import re
import sys

import lunr

# What users type, and the pages that answer.
QUESTIONS = {
    "clip gradients": "tasks", "EMA": "tasks|training_loop", "Muon": "optimizers", "resume": "tasks|checkpoints",
    "out of memory": "gpu|tasks", "gradient accumulation": "tasks", "mixed precision": "tasks|gpu", "bfloat16": "tasks|gpu",
    "learning rate schedule": "tasks|training_loop", "save checkpoint": "tasks|checkpoints", "load checkpoint": "tasks|checkpoints",
    "hugging face": "tasks|checkpoints", "torchrun": "second_host|getting_started|python|from_ddp|checkpoints",
    "mpirun": "second_host|from_mpi", "tensor parallel": "dist_tensors|tasks", "pipeline": "dist_tensors|tasks",
    "freeze parameters": "tasks", "LoRA": "cookbook|tasks", "activation checkpointing": "tasks", "offload": "gpu|tasks",
    "DDP": "from_ddp", "FSDP2": "from_fsdp2", "unused parameters": "tasks", "hang": "tasks", "timeout": "tasks",
    "random seed": "tasks", "metrics": "tasks|training_loop", "data loader": "tasks", "early stopping": "tasks|training_loop", "GPU": "gpu",
}


def main():
    documents = json.loads((pathlib.Path(sys.argv[1]) / "search" / "search_index.json").read_text())["docs"]
    weighted = [({**document, "ref": str(number)}, {"boost": document.get("boost", 1)}) for number, document in enumerate(documents)]
    index = lunr.lunr(ref="ref", fields=[{"field_name": "title", "boost": 1000}, "text"], documents=weighted)
    problems = []
    for question, pages in QUESTIONS.items():
        words = [word for word in question.split() if index.search(word)]  # those so common that none is found are left out
        found = index.search(" ".join(f"+{word}" for word in words))
        first = documents[int(found[0]["ref"])]["location"] if found else "nothing"
        if not re.match(rf"docs/guide/({pages})[.]html", first):
            problems.append(f"the search for \"{question}\" finds {first} first; expected {pages}")
    print("\n".join(problems) if problems else f"search: {len(QUESTIONS)} questions find a page that answers first")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
