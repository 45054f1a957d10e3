"""Configuration: the only place where options and environment become values, each checked once.

A bad value stops the start with exit status 2, naming option, value and range. The parsers below say value and range;
the command line puts the name of the option before it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gateway.errors import ConfigError, shorten
from gateway.limits import MAX_RATE, KeyLimits
from scheduler.config import (
    DEFAULT_MODEL,
    CacheConfig,
    EngineConfig,
    ModelParts,
    SchedulerConfig,
)
from scheduler.messages import MAX_SLOTS, MAX_SPEC

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_CONTEXT = 2**20
MAX_QUEUE = 100_000
MAX_PREFILL = 65_536
MAX_DRAIN_S = 3600.0
MAX_CONVERSATIONS = 100_000
MAX_CACHE_MIB = 2**24
MAX_EXPERTS = 2**32
PLE_IO = ("ram", "mmap", "direct")
_MIB = 2**20
_CACHE = CacheConfig()
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
RESUMES = {"auto": None, "exact": False, "fast": True}
"""Whether decoded state is resumed; None leaves it to what the engine says of itself."""
DTYPES = ("auto", "float32", "bfloat16")
KV_TYPES = ("auto", "fp32", "bf16", "int8")
_KEY_NAME_LIMIT = 64
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One line of the key file."""

    name: str
    """Owner: conversations of two owners are never shared."""
    secret: str = field(repr=False)
    limits: KeyLimits = KeyLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Choices of the HTTP side."""

    host: str = "127.0.0.1"
    port: int = 8080
    served_model_name: str | None = None
    """None takes the engine's name for the model."""
    api_keys: tuple[ApiKey, ...] = ()
    """Empty: anyone may ask."""
    cors_origins: tuple[str, ...] = ()
    """Empty: web pages of other origins may not."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that the server answers to besides its addresses and localhost."""
    drain_s: float = 30.0
    """How long a stopping server lets running requests finish."""
    log_level: str = "info"
    log_format: str = "text"
    otlp_endpoint: str | None = None
    """Where traces are sent; None: nowhere."""
    max_body_bytes: int = 16 * 2**20
    keepalive_s: float = 10.0
    """Pause between the comments that keep a silent stream open."""
    send_timeout_s: float = 30.0
    """A stream's reader that takes nothing for so long is left."""
    body_timeout_s: float = 30.0
    """A body that does not go on for so long is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """Everything a server is started with."""

    gateway: GatewayConfig
    scheduler: SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `serve` as they were parsed, before they are checked against each other."""

    model: str | None = None
    """None: the shipped one, unless native or pack is the model."""
    native: str | None = None
    pack: str | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    api_key_file: Path | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    device: str = "auto"
    dtype: str = "auto"
    kv: str = "auto"
    kernels: str = "auto"
    threads: int | None = None
    batch: int = MAX_SLOTS
    max_context: int | None = None
    spec: int | None = None
    """None: the longest there is, or none with no_mtp."""
    spec_min_p: float = 0.5
    no_mtp: bool = False
    prefill: int | None = None
    expert_cache: int | None = None
    """None: auto."""
    expert_profile: Path | None = None
    pool_workers: int | None = None
    vram_reserve_mib: int | None = None
    ple_io: str = "ram"
    ple_gguf: str | None = None
    kv_resident: int = 0
    mtp: str | None = None
    batch_groups: int = 1
    vision: bool = False
    max_queue: int = 64
    conversation_cache_slots: int = _CACHE.max_conversations
    conversation_cache_mib: int = _CACHE.capacity_bytes // _MIB
    conversation_cache_min_free_mib: int = _CACHE.min_free_bytes // _MIB
    conversation_cache_dir: Path | None = None
    conversation_cache_disk_mib: int | None = None
    """None: the default, where there is a directory."""
    resume: str = "auto"
    drain_s: float = 30.0
    log_level: str = "info"
    log_format: str = "text"
    otlp_endpoint: str | None = None


def load_config(options: ServeOptions) -> AppConfig:
    """Options to configuration. Raises ConfigError for what cannot be combined or used."""
    model = _model(options)
    if options.no_mtp and options.spec not in (None, 0):
        raise ConfigError(f"--no-mtp serves without drafts, but --spec is {options.spec}")
    if options.spec == 0 and not options.no_mtp:
        raise ConfigError(
            "--spec is 0, but serving needs the draft layer: give 1 to 4, or --no-mtp for a plain baseline"
        )
    _refuse_missing(options)
    _check_groups(options)
    keys = () if options.api_key_file is None else read_api_keys(options.api_key_file)
    return AppConfig(
        gateway=GatewayConfig(
            host=options.host,
            port=options.port,
            served_model_name=options.served_model_name or _shipped_name(model),
            api_keys=keys,
            cors_origins=options.cors_origins,
            allowed_hosts=options.allowed_hosts,
            drain_s=options.drain_s,
            log_level=options.log_level,
            log_format=options.log_format,
            otlp_endpoint=options.otlp_endpoint,
        ),
        scheduler=SchedulerConfig(
            engine=EngineConfig(
                model=model,
                parts=_parts(options),
                device=options.device,
                dtype=options.dtype,
                kv=options.kv,
                kernels=options.kernels,
                threads=options.threads,
                num_slots=options.batch,
                max_context=options.max_context,
                chunk_tokens=options.prefill,
                expert_cache=options.expert_cache,
                expert_profile=None
                if options.expert_profile is None
                else str(options.expert_profile),
                pool_workers=options.pool_workers,
                vram_reserve_mib=options.vram_reserve_mib,
                ple_io=options.ple_io,
                num_groups=options.batch_groups,
                max_draft=0 if options.no_mtp else _first(options.spec, MAX_SPEC),
                max_parked_bytes=options.conversation_cache_mib * _MIB,
                parked_dir=_parked_dir(options),
            ),
            max_queue=options.max_queue,
            spec_min_p=options.spec_min_p,
            cache=CacheConfig(
                max_conversations=options.conversation_cache_slots,
                capacity_bytes=options.conversation_cache_mib * _MIB,
                min_free_bytes=options.conversation_cache_min_free_mib * _MIB,
                disk_bytes=(
                    _CACHE.disk_bytes
                    if options.conversation_cache_disk_mib is None
                    else options.conversation_cache_disk_mib * _MIB
                ),
                resumes_decoded=RESUMES[options.resume],
            ),
            owner_identities=_owner_identities(keys),
        ),
    )


def _model(options: ServeOptions) -> str:
    """The one model that the options name."""
    if options.model == "":
        raise ConfigError("--model is empty: give a checkpoint directory, or `default`")
    named = {"--model": options.model, "--native": options.native, "--pack": options.pack}
    given = {option: value for option, value in named.items() if value is not None}
    if tuple(given) == ("--native", "--pack"):
        given.pop("--native")  # the file that the pack leaves tensors in
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} each name a model: give one of them")
    for option, file in (("--native", options.native), ("--ple-gguf", options.ple_gguf)):
        if file is not None and not file.endswith(".gguf"):
            raise ConfigError(f"{option} must be a GGUF file, *.gguf; found {shorten(file)!r}")
    if options.pack is not None and not (Path(options.pack) / "index.txt").is_file():
        raise ConfigError(
            f"--pack must be a directory with an index.txt; found {shorten(options.pack)!r}"
        )
    return next(iter(given.values()), DEFAULT_MODEL)


def _parts(options: ServeOptions) -> ModelParts:
    """What of the model comes from other files."""
    if options.mtp is not None and options.no_mtp:
        raise ConfigError(f"--no-mtp serves without a draft layer, but --mtp is {options.mtp}")
    return ModelParts(
        native=None if options.pack is None else options.native,
        ple_gguf=options.ple_gguf,
        mtp=options.mtp,
    )


def _parked_dir(options: ServeOptions) -> str | None:
    directory = options.conversation_cache_dir
    if directory is None:
        if options.conversation_cache_disk_mib is not None:
            raise ConfigError(
                "--conversation-cache-disk-mib limits the files in --conversation-cache-dir, which is not given"
            )
        return None
    if not options.conversation_cache_slots or not options.conversation_cache_mib:
        raise ConfigError(
            "--conversation-cache-dir keeps what is parked in memory as well, but --conversation-cache-slots or "
            "--conversation-cache-mib is 0"
        )
    return str(directory.absolute())


def _owner_identities(keys: tuple[ApiKey, ...]) -> tuple[tuple[str, str], ...]:
    """One-way digests of all the secrets that each name stands for."""
    secrets: dict[str, list[str]] = {}
    for key in keys:
        secrets.setdefault(key.name, []).append(key.secret)
    return tuple(
        (name, blake2b("\n".join(sorted(found)).encode(), digest_size=32).hexdigest())
        for name, found in secrets.items()
    )


def _refuse_missing(options: ServeOptions) -> None:
    """What this build cannot do is refused with the reason, not taken and forgotten."""
    if options.vision:
        raise ConfigError("--vision: no image encoder is in this build; serve without it")
    if options.kv_resident:
        raise ConfigError(
            f"--kv-resident is {options.kv_resident}, but all K/V cells lie on the device in this build: give 0, and "
            "lower --max-context or give --kv int8 where they do not fit"
        )


def _check_groups(options: ServeOptions) -> None:
    """What the stages of several groups cannot do."""
    groups = options.batch_groups
    if groups == 1:
        return
    if groups > options.batch:
        raise ConfigError(
            f"--batch-groups is {groups}, but --batch is {options.batch}: each group needs a slot"
        )
    alone = {
        "--conversation-cache-dir": options.conversation_cache_dir,
        "--expert-cache": options.expert_cache,
        "--expert-profile": options.expert_profile,
    }
    given = [name for name, value in alone.items() if value is not None]
    if given:
        raise ConfigError(
            f"--batch-groups is {groups}, which spreads the layers over as many devices, but {given[0]} is about one: "
            "leave one of them out"
        )


def _first(value: int | None, default: int) -> int:
    return default if value is None else value


def _shipped_name(model: str) -> str | None:
    """The shipped model is called what the option calls it, not what its folder is called."""
    return DEFAULT_MODEL if model == DEFAULT_MODEL else None


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """One key per line, `name:key` or `key`, then its limits; blank lines and lines that begin with # do not count.

    Limits are `rpm=N` (requests a minute), `tpm=N` (tokens a minute) and `concurrent=N`, each at most once.
    Raises ConfigError naming file and line, never the key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--api-key-file {path}: {reason}") from error
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        where = f"--api-key-file {path}, line {number}"
        name, colon, rest = text.partition(":")
        if not colon:
            name, rest = f"key{number}", text
        secret, *limits = rest.split() or [""]
        name = name.strip()
        if not secret or not secret.isascii():
            raise ConfigError(f"{where}: a key has 1 or more ASCII characters without spaces")
        if not 0 < len(name) <= _KEY_NAME_LIMIT:
            raise ConfigError(f"{where}: a name has 1 to {_KEY_NAME_LIMIT} characters")
        if any(key.secret == secret for key in keys):
            raise ConfigError(f"{where}: the same key twice")
        keys.append(ApiKey(name=name, secret=secret, limits=_key_limits(where, limits)))
    if not keys:
        raise ConfigError(f"--api-key-file {path}: has no key")
    return tuple(keys)


_LIMITS = {"rpm": "requests_per_min", "tpm": "tokens_per_min", "concurrent": "max_concurrent"}
"""Words of the key file, and the fields of KeyLimits."""


def _key_limits(where: str, words: list[str]) -> KeyLimits:
    found: dict[str, int] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in _LIMITS:
            raise ConfigError(
                f"{where}: behind a key come rpm=N, tpm=N and concurrent=N, and no key has a space"
            )
        if _LIMITS[name] in found:
            raise ConfigError(f"{where}: {name} twice")
        try:
            found[_LIMITS[name]] = count(1, MAX_RATE)(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {name} {error}") from None
    return KeyLimits(**found)


def count(low: int, high: int) -> Callable[[str], int]:
    """A parser for whole numbers in [low, high]: digits and nothing else."""

    def parse(text: str) -> int:
        if (
            not (text.isascii() and text.isdigit() and len(text) < 20)
            or not low <= int(text) <= high
        ):
            raise ConfigError(
                f"must be a whole number from {low} to {high}; found {shorten(text)!r}"
            )
        return int(text)

    return parse


def count_or_auto(low: int, high: int) -> Callable[[str], int | None]:
    """Like count; `auto` is None."""
    parse_count = count(low, high)

    def parse(text: str) -> int | None:
        if text == "auto":
            return None
        try:
            return parse_count(text)
        except ConfigError:
            raise ConfigError(
                f"must be auto or a whole number from {low} to {high}; found {shorten(text)!r}"
            ) from None

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """A parser for finite numbers in [low, high]."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        # float() also takes "1_0", " 1" and "infinity".
        plain = text.isascii() and "_" not in text and text == text.strip()
        if not plain or not low <= value <= high:
            raise ConfigError(f"must be a number from {low:g} to {high:g}; found {shorten(text)!r}")
        return value

    return parse


def choice(allowed: tuple[str, ...]) -> Callable[[str], str]:
    """A parser for one of a few words."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise ConfigError(f"must be one of {', '.join(allowed)}; found {shorten(text)!r}")
        return text

    return parse


def path_text(text: str) -> str:
    """A path as it was given; an empty one would be the current directory."""
    if not text:
        raise ConfigError(f"must be a path; found {text!r}")
    return text


def path(text: str) -> Path:
    """Like path_text."""
    return Path(path_text(text))


def address(text: str) -> str:
    """What to listen on; nothing would be every interface, without the check of names that protects the local one."""
    if not text.strip():
        raise ConfigError(
            f"must be an address such as 127.0.0.1, or 0.0.0.0 for all of them; found {text!r}"
        )
    return text


def origin(text: str) -> str:
    """An origin as browsers send it, since it is compared letter by letter; `*` is any, `null` that of local files."""
    if text not in ("*", "null") and not _ORIGIN.fullmatch(text):
        raise ConfigError(
            "must be an origin such as https://chat.example or http://localhost:3000, in lower case and without a "
            f"path, or * or null; found {shorten(text)!r}"
        )
    return text


def host_name(text: str) -> str:
    """A name of this server as a Host header has it, less the port."""
    if not _HOST_NAME.fullmatch(text):
        raise ConfigError(
            "must be a host name such as box.lan, without scheme, port and path (addresses are let in anyway); "
            f"found {shorten(text)!r}"
        )
    return text


def model_name(text: str) -> str:
    """A name that requests can give and people can read."""
    if not text or not text.isprintable() or text != text.strip():
        raise ConfigError(
            "must be 1 or more printable characters without a space at either end; "
            f"found {shorten(text)!r}"
        )
    return text


def http_url(text: str) -> str:
    """An http or https URL with a host, and nothing behind its path."""
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or any(char in text for char in "?# ") or not text.isprintable():
        raise ConfigError(
            f"must be an http or https URL such as http://127.0.0.1:4318; found {shorten(text)!r}"
        )
    return text


def device(text: str) -> str:
    """auto, cpu, cuda or cuda:N."""
    name, colon, index = text.partition(":")
    is_indexed = name == "cuda" and colon and index.isascii() and index.isdigit()
    if text not in ("auto", "cpu", "cuda") and not is_indexed:
        raise ConfigError(f"must be auto, cpu, cuda or cuda:N; found {shorten(text)!r}")
    return text
