"""Fields that OpenAI, Anthropic, vLLM, SGLang or llama-server know and that are not honoured here.

Each comes with the values that ask for nothing: those are taken, any other is refused by name. Fields that could not
change an answer here (hints about caches, prices and speed) are in no list and are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gateway.fields import describe, refuse

if TYPE_CHECKING:
    from gateway.fields import Fields

OffValues = Mapping[str, tuple[object, ...]]

_EVERYWHERE: OffValues = {
    # OpenAI
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
    "store": (False,),
    "verbosity": ("medium",),
    "best_of": (1,),
    # Older ways to a format
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": ("",),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    # vLLM and SGLang
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "custom_logit_processor": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora_path": (),
    "no_stop_trim": (False,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # llama-server
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "id_slot": (-1,),
    "image_data": ([],),
    "lora": ([],),
    "mirostat": (0,),
    "n_cmpl": (1,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "repeat_last_n": (-1,),
    "repeat_penalty": (1, 1.0),
    "return_progress": (False,),
    "return_tokens": (False,),
    "samplers": (),
    "t_max_predict_ms": (0, -1),
    "timings_per_token": (False,),
    "top_n_sigma": (-1, -1.0),
    "typical_p": (1, 1.0),
    "xtc_probability": (0, 0.0),
}
_SERVICE: OffValues = {"service_tier": ("auto", "default")}
_THOUGHTS: OffValues = {
    "chat_template": (),
    "documents": ([],),
    "include_reasoning": (True,),
    "reasoning_format": ("auto", "deepseek"),
    "separate_reasoning": (True,),
}
OFF_IN_CHAT: OffValues = {**_EVERYWHERE, **_SERVICE, **_THOUGHTS, "echo": (False,)}
OFF_IN_COMPLETION: OffValues = {
    **_EVERYWHERE,
    **_SERVICE,
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "thinking_budget": (),
    "thinking_token_budget": (),
}
OFF_IN_RESPONSE: OffValues = {
    **_EVERYWHERE,
    **_SERVICE,
    **_THOUGHTS,
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled",),
}
OFF_IN_MESSAGE: OffValues = {
    **_EVERYWHERE,
    **_THOUGHTS,
    "compaction": (),
    "container": ({},),
    "context_management": ({},),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "thread": (),
}
_REASONS = {
    "previous_response_id": "cannot be honoured: this server keeps no responses; send the conversation in input",
    "conversation": "cannot be honoured: this server keeps no conversations; send this one in input",
    "store": "must be false: this server keeps no responses",
}


def refuse_unsupported(fields: Fields, known: OffValues) -> None:
    """Raises InvalidRequest for a field that asks for something that is not honoured."""
    for name, value in fields.values.items():
        off = known.get(name)
        if off is None or value is None:
            continue
        # `in` would take True for 1.
        if not any(type(value) is type(x) and value == x for x in off):
            default = f"is not supported by this server; found {describe(value)}"
            refuse(name, _REASONS.get(name, default))
