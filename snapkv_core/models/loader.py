"""Load a model and its tokenizer from the demo, a folder or a hub id, and prove it servable."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from snapkv_core.config import EngineConfig
from snapkv_core.errors import ModelLoadError
from snapkv_core.models.decoder import LayeredDecoder
from snapkv_core.models.demo import ensure_demo_model
from snapkv_core.models.device import choose_device, choose_dtype, choose_product_dtype
from snapkv_core.models.packed_linear import pack_linears
from snapkv_core.models.probe import (
    layered_logits,
    own_logits,
    probe_token_ids,
    require_same_logits,
)
from snapkv_core.models.spec import ModelSpec
from snapkv_core.models.tokenizer import HFTokenizer, Tokenizer

DEMO_MODEL: Final = "demo"
#: They compute the rotation from the largest position in a batch, so that a long neighbour would
#: change a short request's answer.
_POSITION_DEPENDENT_ROPE: Final = frozenset({"dynamic", "longrope"})
#: PyTorch's own CPU products handle rows in tiles and round otherwise in a tile that is not full.
#: Measured in float32: rows of 4, 8 and 12 are bit-equal, of 1 to 3, 5 to 7 and 9 not.
_UNPACKED_ROW_MULTIPLE: Final = 4


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that has passed its probe.

    Attributes:
        decoder: The model, layer by layer.
        tokenizer: Its tokenizer.
        spec: Its shape and limits.
        decode_row_multiple: A decode batch is padded to a multiple of this many rows, so that a
            sequence's numbers do not depend on how many neighbours it has.
    """

    decoder: LayeredDecoder
    tokenizer: Tokenizer
    spec: ModelSpec
    decode_row_multiple: int


def load_model(config: EngineConfig) -> LoadedModel:
    """Load what `config.model` names.

    Raises:
        ModelLoadError: It is missing, gated, needs code of its own, or cannot be run layer by
            layer; the message says what to do.
    """
    # Late: it takes seconds, and whoever serves or asks another engine has no use for it.
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # Progress bars on standard error would break a log of one JSON object per line.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = choose_device(config.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    dtype = choose_dtype(config.dtype, device)
    source, revision = locate_model(config)
    try:
        model_config = AutoConfig.from_pretrained(source, revision=revision)
        refuse_unsupported(model_config, config.max_model_len)
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
        auto_model: Any = AutoModelForCausalLM  # its annotation knows no loading info
        model, loading = auto_model.from_pretrained(
            source,
            revision=revision,
            dtype=dtype,
            device_map={"": device},
            output_loading_info=True,
        )
        _require_all_weights(config.model, loading)
        loaded = prepare_model(model, tokenizer, config)
        if device.type == "cpu":
            _release_file(model)
        return loaded
    except ModelLoadError:
        raise
    except Exception as error:
        # What a folder can hold and a library can raise about it is without end; whoever starts
        # the service needs one line in each case.
        raise ModelLoadError(_explain(config.model, error)) from error


def prepare_model(model: Any, tokenizer: Any, config: EngineConfig) -> LoadedModel:
    """Take a transformers model apart and prove that the parts give its own logits.

    Args:
        model: A causal LM. It is put in evaluation mode, switched to the engine's attention
            function and, on a CPU, to packed linear layers; it still works on its own afterwards,
            but cannot be trained or saved.
        tokenizer: A transformers tokenizer, or anything that follows the `Tokenizer` protocol.
        config: Limits and name; `config.model` is only a name here.

    Raises:
        ModelLoadError: The model cannot be served.
    """
    refuse_unsupported(model.config, config.max_model_len)
    model.eval()
    family = type(model).__name__
    token_ids = probe_token_ids(model.config.vocab_size, model.device)
    adapted = tokenizer if hasattr(tokenizer, "render_chat") else _adapt(tokenizer, model)
    try:
        spec = _describe(model, config, adapted)
        is_cpu = model.device.type == "cpu"
        if is_cpu:
            pack_linears(model, choose_product_dtype(model.dtype))
        own = own_logits(model, token_ids)
        decoder = LayeredDecoder(model)
        layered = layered_logits(decoder, token_ids)
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{family} cannot be run layer by layer: {error}") from error
    require_same_logits(family, own, layered, decoder.dtype)
    is_unpacked = any(isinstance(module, torch.nn.Linear) for module in model.modules())
    row_multiple = _UNPACKED_ROW_MULTIPLE if is_cpu and is_unpacked else 1
    return LoadedModel(decoder, adapted, spec, row_multiple)


def _release_file(model: Any) -> None:
    """Copy the weights that are left, so that the file behind them is not held in memory whole.

    They are views of it, and the packed layers have read the rest of it once and need it no more.
    """
    for weight in model.parameters():
        weight.data = weight.data.clone()


def _require_all_weights(name: str, loading: Mapping[str, Any]) -> None:
    """Refuse a model with random weights: the probe runs both ways on the same and sees nothing."""
    for kind in ("missing_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in loading.get(kind) or ())
        if keys:
            raise ModelLoadError(
                f"model {name!r} has {len(keys)} {kind.replace('_', ' ')} in its weights, "
                f"{keys[0]} the first: its files are not whole or belong to another model"
            )


def refuse_unsupported(model_config: Any, max_model_len: int | None) -> None:
    """Refuse from the configuration alone what would fail later or answer wrongly.

    Raises:
        ModelLoadError: A sliding window shorter than the context, or position-dependent RoPE.
    """
    context = max_model_len or getattr(model_config, "max_position_embeddings", None)
    if context is None:
        raise ModelLoadError(
            f"{type(model_config).__name__} states no context length (max_position_embeddings), "
            "so it is not a decoder-only text model that can be served here"
        )
    window = getattr(model_config, "sliding_window", None)
    if getattr(model_config, "use_sliding_window", True) and window and window < context:
        raise ModelLoadError(
            f"this model attends through a sliding window of {window} tokens, shorter than its "
            f"context of {context}: tokens outside it cannot be kept by choice. Serve a version "
            f"without one (Mistral v0.2 or later), or set max_model_len to at most {window}"
        )
    rope = getattr(model_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in _POSITION_DEPENDENT_ROPE:
        raise ModelLoadError(
            f"this model's RoPE ({kind}) depends on the longest sequence in a batch, so one "
            "request would change another's answer"
        )


def locate_model(config: EngineConfig) -> tuple[str, str | None]:
    """Return what transformers should open, and the revision when it is a hub id.

    Raises:
        ModelLoadError: There is no such folder, and it is no hub id.
    """
    if config.model == DEMO_MODEL:
        return str(ensure_demo_model(config.cache_dir)), None
    folder = Path(config.model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"the folder {folder} has no config.json, so it holds no model")
        return str(folder), None
    is_hub_id = config.model.count("/") == 1 and not config.model.startswith(("/", ".", "~"))
    if not is_hub_id:
        raise ModelLoadError(
            f"there is no model folder {config.model!r}, and it is no hub id "
            "(owner/name) and not 'demo'"
        )
    return config.model, config.revision


def _explain(name: str, error: BaseException) -> str:
    """Turn what transformers or the hub client raised into one line that says what to do."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    kinds = {type(cause).__name__ for cause in causes}
    text = " ".join(str(error).split())
    if "GatedRepoError" in kinds or "gated repo" in text:
        return (
            f"model {name!r} is gated: accept its terms on the hub and give this process a "
            "token (HF_TOKEN)"
        )
    if "RepositoryNotFoundError" in kinds or "is not a valid model identifier" in text:
        return f"model {name!r} does not exist on the hub, or is private and HF_TOKEN is missing"
    if "couldn't connect to" in text or "LocalEntryNotFoundError" in kinds:
        return (
            f"model {name!r} is not in the hub's cache on this machine and the hub cannot be "
            "reached; name a local folder instead"
        )
    if "trust_remote_code" in text:
        return f"model {name!r} needs code of its own, which is never run here"
    return f"model {name!r} could not be loaded: {type(error).__name__}: {text[:300]}"


def _adapt(tokenizer: Any, model: Any) -> HFTokenizer:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = model.config.eos_token_id
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return HFTokenizer(tokenizer, frozenset(ids))


def _describe(model: Any, config: EngineConfig, tokenizer: Tokenizer) -> ModelSpec:
    shape = model.config
    context = int(shape.max_position_embeddings)
    if config.max_model_len is not None and config.max_model_len > context:
        raise ModelLoadError(
            f"max_model_len is {config.max_model_len}, but the model's context holds {context}"
        )
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return ModelSpec(
        name=config.served_model_name or _served_name(config.model),
        num_layers=shape.num_hidden_layers,
        num_q_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=head_dim,
        hidden_size=shape.hidden_size,
        intermediate_size=getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size,
        layer_weights=sum(weight.numel() for weight in model.base_model.layers[0].parameters()),
        vocab_size=shape.vocab_size,
        max_model_len=config.max_model_len or context,
        eos_token_ids=tokenizer.eos_token_ids,
    )


def _served_name(model: str) -> str:
    """A folder is served under its last part, so that answers do not tell the server's paths."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model
