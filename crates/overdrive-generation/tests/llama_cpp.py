"""Runs a GGUF file in llama.cpp: reads a request from standard input, prints the answer. Both are JSON.

Request: {"model": file, "lora": file or null, "prompt": ids, "n": number of tokens, "texts": texts to tokenize}
Answer:  {"tokens": ids, "logprobs": pairs of a token and its log-probability, without tokens that are part of a
         character, "texts": ids of each text}

Needs: pip install xllamacpp
"""

import json
import os
import sys
import urllib.request

import xllamacpp as llama


def main() -> None:
    request = json.load(sys.stdin)
    # The library prints to standard output.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    params = llama.CommonParams()
    params.model.path = request["model"]
    if request["lora"]:
        adapter = llama.CommonAdapterLoraInfo()
        adapter.path = request["lora"]
        adapter.scale = 1.0
        params.lora_adapters = [adapter]
    params.n_gpu_layers = 0
    params.n_ctx = 512
    params.n_parallel = 1
    params.cache_type_k = llama.ggml_type.GGML_TYPE_F32
    params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = False
    server = llama.Server(params)

    def ask(path: str, body: dict) -> dict:
        url = server.listening_address + path
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            return json.load(answer)

    completion = ask(
        "/completion",
        {
            "prompt": request["prompt"],
            "n_predict": request["n"],
            "temperature": 0,
            "top_k": 1,
            "repeat_penalty": 1.0,
            "ignore_eos": False,
            "return_tokens": True,
            "n_probs": 1,
            "cache_prompt": False,
        },
    )
    texts = [
        ask("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
        for text in request["texts"]
    ]
    answer = {
        "tokens": completion["tokens"],
        "logprobs": [
            (token["id"], token["logprob"]) for token in completion["completion_probabilities"]
        ],
        "texts": texts,
    }
    os.write(answer_to, json.dumps(answer).encode())
    # The library's threads would keep the process waiting.
    os._exit(0)


if __name__ == "__main__":
    main()
