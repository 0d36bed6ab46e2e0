"""What the engine tells the outside: plain frozen data, and the observer it may be told through."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from snapkv_core.config import CompressionConfig
from snapkv_core.sampling_params import SamplingParams
from snapkv_core.sequence import FinishReason

#: What a snapshot did for a request: it spared the reading; none was there, and what reading gave
#: was taken to be stored, or was not; or none was asked for.
SnapshotUse = Literal["hit", "stored", "miss", "off"]
SkipReason = Literal["prompt_fits_capacity", "method_full"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the assistant asked for.

    Attributes:
        call_id: Name that the tool's answer refers to.
        name: The tool.
        arguments: JSON text of an object.
    """

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation, for the model's chat template.

    Attributes:
        role: Who speaks.
        content: What was said; None where there are only calls.
        tool_calls: Calls that the assistant asked for.
        tool_call_id: The call that a tool answers.
    """

    role: str
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request as the engine takes it; texts and ids only, so it can cross a process.

    Attributes:
        request_id: Name of the request in events and logs.
        prompt: Raw text, token ids, or messages for the chat template.
        sampling: How tokens are chosen.
        compression: How the prompt's KV cache is compressed.
        explain: Report how many layer-heads kept each prompt token.
        timeout_s: Seconds after submission at which the request is ended, finished or not; None
            takes the engine's own limit, and a longer one is cut to it.
        tools: JSON texts of the tools that the chat template may offer the model.
        echo: Begin each answer's text with the prompt, and report its tokens' log-probabilities
            where those of the answer are reported.
        snapshot_namespace: Tenant whose snapshots it may use and adds to; None keeps out of the
            store.
        tenant: Whose request it is; requests of several tenants take turns.
        max_default_new_tokens: Answer length that the engine's default is cut to where the request
            names none; None leaves the default.
    """

    request_id: str
    prompt: str | tuple[int, ...] | tuple[ChatMessage, ...]
    sampling: SamplingParams
    compression: CompressionConfig
    explain: bool = False
    timeout_s: float | None = None
    tools: tuple[str, ...] = ()
    echo: bool = False
    snapshot_namespace: str | None = None
    tenant: str = ""
    max_default_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RequestSize:
    """How large a request is, once its prompt has been tokenised and defaults are filled in.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        max_new_tokens: Longest answer, tokens.
        num_choices: Answers.
    """

    num_prompt_tokens: int
    max_new_tokens: int
    num_choices: int


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A text whose tokens are asked for.

    Attributes:
        prompt: Raw text, or messages for the chat template.
        add_special_tokens: Add what the model expects around a prompt; None does for text, and
            not for messages, whose template writes it: what generating does.
        add_generation_prompt: End messages with the beginning of the assistant's turn.
        with_token_strs: Ask for the entries of the vocabulary.
        with_offsets: Ask for the characters that each token stands for.
        timeout_s: Seconds that it may take; None takes the engine's own limit.
    """

    prompt: str | tuple[ChatMessage, ...]
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    with_token_strs: bool = False
    with_offsets: bool = False
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokens of a text.

    Attributes:
        text: What was tokenised: the prompt, or the messages as the template renders them.
        token_ids: Its tokens.
        token_strs: Their entries in the vocabulary, if asked for.
        offsets: For each the first character of `text` that it stands for and the one behind its
            last, if asked for. Parts of one character overlap in it; an added token stands for
            none.
    """

    text: str
    token_ids: tuple[int, ...]
    token_strs: tuple[str, ...] | None = None
    offsets: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class KeptTokenCounts:
    """How many KV heads kept each prompt token.

    Attributes:
        per_layer: One `bytes` per layer, a byte per prompt token, the KV heads that kept it.
        num_kv_heads: The most a byte of `per_layer` can be.
        total: Sum over layers, one number per prompt token.
    """

    per_layer: tuple[bytes, ...]
    num_kv_heads: int
    total: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompressionReport:
    """What compression did to one prompt's KV cache.

    Attributes:
        method: Policy that was asked for.
        original_entries: Prompt tokens per layer and KV head before.
        compressed_entries: The same after; the mean where layers or heads differ.
        original_bytes: Bytes of the prompt's K and V in all layers before.
        compressed_bytes: Bytes of the K and V that are kept.
        kept_attention_mass: Share of the observation window's attention to the prefix that the
            kept prefix tokens hold, mean over layers and KV heads; 1.0 when nothing was dropped.
        skipped: Why nothing was dropped, or None when something was.
        compress_ms: Milliseconds spent on scoring, selecting and storing, a part of the prefill.
        kept_counts: Per-token detail, when the request asked to `explain`.
    """

    method: str
    original_entries: int
    compressed_entries: float
    original_bytes: int
    compressed_bytes: int
    kept_attention_mass: float
    skipped: SkipReason | None
    compress_ms: float = field(compare=False)  # a time; what was kept is the same without it
    kept_counts: KeptTokenCounts | None = None

    @property
    def compression_ratio(self) -> float:
        """Original over compressed entries; 20.0 means twenty times smaller."""
        return self.original_entries / self.compressed_entries


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Measured times of one request, milliseconds.

    Attributes:
        queue_ms: Submission until the first prefill slice.
        prefill_ms: First prefill slice until the first token.
        decode_ms: First token until the last of all choices.
        time_to_first_token_ms: Submission until the first token.
        total_ms: Submission until the end.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    time_to_first_token_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """The whole of a finished request.

    Attributes:
        request_id: Name of the request.
        num_prompt_tokens: Tokens of the prompt.
        num_output_tokens: Tokens generated, summed over the choices.
        finish_reasons: One per choice.
        compression: What happened to the KV cache; None when the prompt was never read to its end.
        timings: Measured times.
        snapshot: What a snapshot did for it.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reasons: tuple[FinishReason, ...]
    compression: CompressionReport | None
    timings: RequestTimings
    snapshot: SnapshotUse = "off"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and how likely the model thought it.

    Attributes:
        token_id: The token.
        token: The bytes it stands for, maybe half a character; a special token's name.
        logprob: Natural logarithm of its probability, minus infinity at the least; None for a
            prompt's first token, which nothing comes before.
        is_special: Whether it stands for no text.
    """

    token_id: int
    token: bytes
    logprob: float | None
    is_special: bool = False


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """What the model thought of one position.

    Attributes:
        chosen: The token that is there.
        top: The likeliest ones, the likeliest first; as many as were asked for.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A piece of one choice's answer.

    Attributes:
        request_id: The request it belongs to.
        choice_index: Which of its `n` answers.
        text: New text, never half a character and never part of a stop string; may be empty.
        token_ids: Tokens that became final with this piece.
        finish_reason: Set on the choice's last event.
        summary: Set on the request's last event.
        error: What went wrong, when `finish_reason` is `error` or `deadline`.
        error_field: The parameter that the error is about, where one that the caller sent is.
        logprobs: One for each of `token_ids`, where the request asked for them.
        prompt_logprobs: One for each token of the prompt, on the first event of a choice, where
            the request asked for them.
    """

    request_id: str
    choice_index: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    summary: RequestSummary | None = None
    error: str | None = None
    error_field: str | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The whole answer to one request, for callers that do not stream.

    Attributes:
        texts: One per choice.
        token_ids: One tuple per choice, the end-of-sequence token included.
        summary: Counts, report and timings.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    summary: RequestSummary


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """The cache of snapshots at one moment; paces are 0 before the first measurement.

    Attributes:
        round_trip_s: Seconds until the store says that it holds nothing.
        fetch_bytes_per_s: Pace at which snapshots come and are decoded.
        prefill_tokens_per_s: Pace at which the engine should read a prompt of 4,096 tokens.
        num_pending_bytes: Bytes of K and V that wait for being written.
        is_held_back: Whether the store is left alone since it fails.
    """

    round_trip_s: float
    fetch_bytes_per_s: float
    prefill_tokens_per_s: float
    num_pending_bytes: int
    is_held_back: bool


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment.

    Attributes:
        num_waiting: Requests that wait for memory or for their turn.
        num_running: Sequences being read or generated.
        kv_bytes: Bytes of the pages that hold KV of sequences.
        num_pages_used: Pages that hold KV.
        num_pages_reserved: Pages promised to admitted sequences, those used counted in.
        num_pages_total: Pages of the pool.
        page_bytes: Bytes of one page, keys and values.
        workspace_bytes: Bytes promised to prompts that are being read.
        device_memory_bytes: Bytes the process holds on the device; on a CPU its resident memory.
        last_step_age_s: Seconds since the loop last turned, or since start; small when idle.
        is_alive: Whether the engine thread runs and takes work.
        snapshots: Of the cache of snapshots; None without one.
    """

    num_waiting: int
    num_running: int
    kv_bytes: int
    num_pages_used: int
    num_pages_reserved: int
    num_pages_total: int
    page_bytes: int
    workspace_bytes: int
    device_memory_bytes: int
    last_step_age_s: float
    is_alive: bool
    snapshots: SnapshotStats | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one engine step did, measured.

    Attributes:
        duration_s: The whole step, seconds.
        prefill_s: Its prefill slices; 0 when there were none.
        decode_s: Its decode batch, sampling included; 0 when there was none.
        num_prefill_tokens: Prompt tokens read; one token through one layer counts as one part in
            `num_layers`.
        num_decoded: Sequences that were given a token by the decode batch.
    """

    duration_s: float
    prefill_s: float
    decode_s: float
    num_prefill_tokens: float
    num_decoded: int


class EngineObserver(Protocol):
    """Told of what happened, on the engine thread: be quick; exceptions are logged and dropped."""

    def on_prompt_compressed(self, request_id: str, report: CompressionReport) -> None:
        """Take the report of a prompt that has just been read to its end."""

    def on_request_finished(self, summary: RequestSummary) -> None:
        """Take the summary of a request that ended, for whatever reason."""

    def on_step(self, step: StepStats) -> None:
        """Take what one step did."""
