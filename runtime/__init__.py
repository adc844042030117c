"""The vLLM side of LoRazor: plugin, scheduler, worker and what the server shows. Only this folder imports vLLM."""
