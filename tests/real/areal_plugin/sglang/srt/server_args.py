"""A server that answers AReaL's requests to SGLang, with `generate` of transformers."""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM


class Engine:
    """A model that answers one request at a time."""

    def __init__(self, path: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.lock = threading.Lock()
        self.load(path)

    def load(self, path: str) -> None:
        """Take the weights of a folder."""
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def generate(self, ids: list[int], sampling: dict) -> dict:
        """Return as many tokens as are request for with their log-probabilities, as SGLang does."""
        count, temperature = sampling["max_new_tokens"], sampling["temperature"]
        generated = self.model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_k=0,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=self.model.generation_config.eos_token_id,
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens = generated.sequences[0, len(ids) :].tolist()
        pairs = [
            [scores[0].log_softmax(-1)[token].item(), token, None]
            for scores, token in zip(generated.scores, tokens, strict=True)
        ]
        return {"meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": pairs}}


class Handler(BaseHTTPRequestHandler):
    """SGLang's endpoints, as far as AReaL calls them."""

    protocol_version = "HTTP/1.1"
    engine: Engine

    def answer(self, document: dict) -> None:
        """Send a document of JSON."""
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Be healthy."""
        self.answer({})

    def do_POST(self) -> None:
        """Generate or take weights; pausing is nothing to an engine without a queue."""
        request = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        document = {"success": True}
        with self.engine.lock:
            if self.path == "/generate":
                document = self.engine.generate(request["input_ids"], request["sampling_params"])
            elif self.path == "/update_weights_from_disk":
                self.engine.load(request["model_path"])
        self.answer(document)

    def log_message(self, *_) -> None:
        """Print no line a request."""


def prepare_server_args(words: list[str]) -> None:
    """Serve instead of returning what AReaL would start SGLang with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--random-seed", type=int)
    options, _ = parser.parse_known_args(words)
    Handler.engine = Engine(options.model_path, options.random_seed)
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
