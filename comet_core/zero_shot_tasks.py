"""A task's name -> lm-eval's own task over data from a folder or from the hub, and its documents' hash.

Prompts, choices and metrics are lm-eval's: its YAML file is included, and where the folder $COMET_DATA holds the task's
rows (in the column layout of the hub's data set) only the place of the data is replaced. Few-shot examples are never
used, so training splits need not be there.
"""

import functools
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comet_core.corpus import _why_no_hub
from comet_core.recipe_rules import nearest_hint
from comet_cuda.errors import CometError
from comet_cuda.folders import cache_dir

log = logging.getLogger("comet")


@dataclass(frozen=True)
class LocalTask:
    """Where lm-eval describes a task, and where a data folder holds it."""

    yaml: str  # below lm_eval/tasks
    file: str  # below $COMET_DATA; .jsonl or .jsonl.gz
    split: str  # the split that the file is


LOCAL_TASKS = {
    "piqa": LocalTask("piqa/piqa.yaml", "piqa/validation.jsonl", "validation"),
    "arc_easy": LocalTask("arc/arc_easy.yaml", "arc_easy/test.jsonl", "test"),
    "arc_challenge": LocalTask("arc/arc_challenge.yaml", "arc_challenge/test.jsonl", "test"),
    "hellaswag": LocalTask("hellaswag/hellaswag.yaml", "hellaswag/validation.jsonl", "validation"),
    "winogrande": LocalTask("winogrande/default.yaml", "winogrande/validation.jsonl", "validation"),
    "boolq": LocalTask("super_glue/boolq/default.yaml", "boolq/validation.jsonl", "validation"),
    "lambada_openai": LocalTask("lambada/lambada_openai.yaml", "lambada_openai/test.jsonl", "test"),
}
PAPER_TASKS = ("piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande")  # whose mean the paper's table 2 gives
TEMPLATES = 256  # kept
REQUESTS = ("multiple_choice", "loglikelihood")  # output types that are scored without generating text


@dataclass(frozen=True)
class LoadedTask:
    """A task with its documents.

    Attributes:
        task: lm_eval.api.task.ConfigurableTask. documents: how many it has, before any limit.
        sha256: of the documents as lm-eval shows them to the prompt; equal from folder and hub.
        origin: COMET_DATA | hub. version: lm-eval's version of the task.
    """

    name: str
    task: Any
    documents: int
    sha256: str
    origin: str
    version: str


def parse_tasks(text: str) -> tuple[str, ...]:
    """ "piqa,arc_easy" -> names, each once.

    Errors:
        CometError if nothing is named.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise CometError(f"--tasks {text!r} names no task", f"Give some of {', '.join(LOCAL_TASKS)}.")
    return names


def load_task(name: str) -> LoadedTask:
    """One of lm-eval's tasks.

    Args:
        name: as lm-eval calls it. Those of LOCAL_TASKS are read from $COMET_DATA where it holds them.

    Errors:
        CometError: lm-eval is not installed, the task is unknown, of another kind, or its data cannot be had.
    """
    manager_class = _task_manager()
    path = _local_file(name)
    try:
        task = _local_task(manager_class, name, path) if path is not None else _hub_task(manager_class, name)
    except CometError:
        raise
    except Exception as error:  # network, data sets, YAML: each library has classes of its own
        first = (str(error).splitlines() or ["no reason given"])[0]
        raise CometError(
            f"the task {name} cannot be loaded ({type(error).__name__}: {first})",
            "Set COMET_DATA to a folder that holds its data"
            + (f" ({LOCAL_TASKS[name].file})" if name in LOCAL_TASKS else "")
            + ", or connect to the hub.",
        ) from None
    if task.OUTPUT_TYPE not in REQUESTS:
        raise CometError(
            f"the task {name} is of the kind {task.OUTPUT_TYPE}, which generates text",
            f"comet eval --tasks scores given answers: {', '.join(REQUESTS)}.",
        )
    rows = [json.dumps(row, sort_keys=True, ensure_ascii=True) for row in task.eval_docs]
    sha256 = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    return LoadedTask(name, task, len(rows), sha256, "hub" if path is None else "COMET_DATA", str(task.VERSION))


def _task_manager() -> Any:
    try:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        import datasets
        from lm_eval import utils
        from lm_eval.tasks import TaskManager

        datasets.disable_progress_bars()
        _keep_templates(getattr(utils, "env", None))
    except ImportError as error:
        raise CometError(
            f"zero-shot tasks need lm-eval, which cannot be imported ({error})", 'Install it: pip install "lm-eval"'
        ) from None
    return TaskManager


def _keep_templates(environment: Any) -> None:
    """lm-eval compiles a task's few templates again for every document, which takes longer than small models do."""
    if environment is not None and not hasattr(environment.from_string, "cache_info"):
        environment.from_string = functools.lru_cache(TEMPLATES)(environment.from_string)


def _local_file(name: str) -> Path | None:
    """The task's rows in the data folder; None if there are none."""
    setting = os.environ.get("COMET_DATA")
    if not setting or name not in LOCAL_TASKS:
        return None
    folder = Path(setting).expanduser()
    if not folder.is_dir():
        raise CometError(f"COMET_DATA is {setting}, which is no folder", "Correct it, or unset it to use the hub.")
    path = folder / LOCAL_TASKS[name].file
    return next((p for p in (path, path.with_suffix(".jsonl.gz")) if p.is_file()), None)


def _local_task(manager_class: Any, name: str, path: Path) -> Any:
    """lm-eval's task over the rows of `path`: its own YAML, included by one that only says where the rows are."""
    import lm_eval.tasks
    import yaml

    local = LOCAL_TASKS[name]
    content = {
        "include": str(Path(lm_eval.tasks.__file__).parent / local.yaml),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {local.split: str(path)}, "cache_dir": str(cache_dir() / "datasets")},
        "training_split": None,
        "validation_split": None,
        "test_split": None,
        "num_fewshot": 0,
        f"{local.split}_split": local.split,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{name}.yaml").write_text(yaml.safe_dump(content))
        manager = manager_class(include_defaults=False, include_path=folder)
        return manager.load([name])["tasks"][name]


def _hub_task(manager_class: Any, name: str) -> Any:
    """lm-eval's task as it is: its data set comes from the hub, or from the hub's own cache."""
    from lm_eval.tasks import __file__ as tasks_file

    near = [Path(tasks_file).parent / Path(LOCAL_TASKS[name].yaml).parent] if name in LOCAL_TASKS else None
    manager = manager_class(include_defaults=near is None, include_path=near)
    if name not in manager.all_subtasks:
        raise CometError(f"lm-eval has no task {name}", nearest_hint(name, LOCAL_TASKS))
    if reason := _why_no_hub():
        raise OSError(reason)
    return manager.load([name])["tasks"][name]
