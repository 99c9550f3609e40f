"""Write the models of an engine from the config.pbtxt templates of this package.

The templates use upstream's variables. The first model of a repository has helper models with the
names of the tutorials: `ensemble`, `preprocessing`, `tensorrt_llm`, `postprocessing`. Those of
further models are named after their model: `gpt2-ensemble` and so on. Each model folder appears
complete or not at all: it is written under a temporary name in the same folder and then renamed.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from importlib import resources
from pathlib import Path

from slipstream.repository.config import CONFIG_NAME

VERSION = "1"
ENSEMBLE = "ensemble"
FIXED_NAMES = ("preprocessing", "postprocessing", "tensorrt_llm", ENSEMBLE)
BLS_TEMPLATE = "tensorrt_llm_bls"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"\$\{([^{}\s]*)\}")
# a model's own name, and the names of an ensemble's steps
_HELPER = re.compile(rf'^( *(?:name|model_name): )"({"|".join(FIXED_NAMES)})"$', re.MULTILINE)


class RepositoryExists(Exception):
    """A folder already exists where a model would be written. Nothing was changed."""


def template(name: str) -> str:
    return (
        resources.files("slipstream.repository")
        .joinpath("templates", f"{name}.pbtxt")
        .read_text("utf-8")
    )


def variables(text: str) -> list[str]:
    """Return the template variables of a text in order, each once."""
    return list(dict.fromkeys(_VARIABLE.findall(text)))


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace `${name}` where `values` has the name. Other variables are left in the text."""
    return _VARIABLE.sub(lambda match: values.get(match.group(1), match.group(0)), text)


def helper_names(repo: Path, model_name: str) -> dict[str, str]:
    """Return the names of a new model's helper models, by their names in the tutorials."""
    if any((repo / name).exists() for name in FIXED_NAMES):
        return {name: f"{model_name}-{name}" for name in FIXED_NAMES}
    return {name: name for name in FIXED_NAMES}


def helpers_among(names: Collection[str]) -> set[str]:
    """Return the names of models that do a part of another model's work, as `write_repository`
    writes them. A repository of the tutorials, with its BLS model, has none.
    """
    own = [name for name in names if name not in FIXED_NAMES]
    helpers = {f"{name}-{part}" for name in own for part in FIXED_NAMES}
    if own and BLS_TEMPLATE not in own:
        helpers |= set(FIXED_NAMES)
    return helpers & set(names)


def write_repository(
    repo: Path, model_name: str, engine_dir: Path, tokenizer_dir: Path, max_batch_size: int
) -> list[Path]:
    """Write the five models that serve one engine beside those that exist. Returns their folders.

    `model_name` is the name of the text-to-text model that clients use.
    """
    if not _NAME.fullmatch(model_name) or model_name in FIXED_NAMES:
        raise ValueError(f"'{model_name}' cannot be a model's name here")
    helpers = helper_names(repo, model_name)
    # the model that needs the others comes last: a running server may look in between
    templates = {**{helpers[name]: name for name in FIXED_NAMES}, model_name: BLS_TEMPLATE}
    check_free(repo, model_name)
    values = _values(model_name, helpers["tensorrt_llm"], engine_dir, tokenizer_dir, max_batch_size)
    repo.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    try:
        for name, source in templates.items():
            text = _fill_all(_with_helpers(template(source), helpers), values)
            _write_model(repo / name, text)
            written.append(repo / name)
    except BaseException:
        for folder in reversed(written):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return written


def check_free(repo: Path, model_name: str) -> None:
    """Raise RepositoryExists if a folder is where a new model or one of its helpers would be."""
    for name in (model_name, *helper_names(repo, model_name).values()):
        if (repo / name).exists():
            raise RepositoryExists(
                f"Found existing model at {repo / name / VERSION}, skipping repo add. "
                f"Remove it first (slipstream remove -m {name}), or choose another name or --repo."
            )


def _with_helpers(text: str, helpers: Mapping[str, str]) -> str:
    """Return a template with these names of the helper models."""
    return _HELPER.sub(lambda match: f'{match[1]}"{helpers[match[2]]}"', text)


def _values(
    model_name: str, engine_name: str, engine_dir: Path, tokenizer_dir: Path, max_batch_size: int
) -> dict[str, str]:
    return {
        "bls_model_name": model_name,
        "engine_dir": escape_quotes(str(engine_dir.absolute())),
        "tokenizer_dir": escape_quotes(str(tokenizer_dir.absolute())),
        "triton_max_batch_size": str(max_batch_size),
        "triton_backend": "tensorrtllm",
        "batching_strategy": "inflight_fused_batching",
        "decoupled_mode": "True",
        "exclude_input_in_output": "True",
        "max_queue_delay_microseconds": "0",
        "preprocessing_instance_count": "1",
        "postprocessing_instance_count": "1",
        "bls_instance_count": "1",
        "tensorrt_llm_model_name": engine_name,
    }


def escape_quotes(text: str) -> str:
    """Return a text as it stands in quotes in config.pbtxt."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _fill_all(text: str, values: Mapping[str, str]) -> str:
    """Fill every variable. A variable without a value becomes "", which means not set."""
    return fill(text, {**dict.fromkeys(variables(text), ""), **values})


def _write_model(folder: Path, config: str) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        # mkdtemp creates the folder with mode 0700, which a server of another user cannot read
        unfinished.chmod(0o755)
        (unfinished / VERSION).mkdir()
        (unfinished / CONFIG_NAME).write_text(config, encoding="utf-8")
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def template_names() -> Iterator[str]:
    for entry in sorted(
        resources.files("slipstream.repository").joinpath("templates").iterdir(),
        key=lambda e: e.name,
    ):
        yield entry.name.removesuffix(".pbtxt")
