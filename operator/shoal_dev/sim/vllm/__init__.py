"""The simulator's vLLM personality: what differs from SGLang's, one file per part.

`args` command line · `memory` KV size · `kv` blocks · `scheduler` batching · `adapterfiles`, `lora` adapters ·
`engine` the whole · `protocol`, `openai`, `writers`, `pooling` requests and answers · `routes` everything else ·
`metrics` · `app` paths and keys · `server` the process.
"""
