//! A server on loopback with the built-in model, and a client that hides nothing.
#![allow(dead_code)]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use sterna::native::{
    BUILTIN, LoadFrom, LocalFolder, LocalModel, Located, Weights, builtin, open_adapter,
};
use sterna::{Adapted, AdapterFiles};
use sterna_engine::lora::ActiveAdapter;
use sterna_engine::plan::PlanOptions;
use sterna_engine::{Backend, Cpu, Model, SessionOptions};
use sterna_kernels::Isa;
use sterna_server::{Models, Served, Server, Settings};

/// A running server.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) server: Server,
}

/// The built-in model, called `name`, with room for `ctx_len` tokens.
pub(crate) fn model(name: &str, ctx_len: usize) -> Served<Cpu> {
    model_on(1, name, ctx_len)
}

/// The same, for `n` engines.
pub(crate) fn model_on(n: usize, name: &str, ctx_len: usize) -> Served<Cpu> {
    let files = LocalModel::open(BUILTIN, builtin(), None, None).unwrap();
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let session = SessionOptions::new(ctx_len);
    let adapted = loaded(n);
    let served = Served::new(name, &files, plan, session, &mut Vec::new()).unwrap();
    served.with_weights(adapted)
}

/// The built-in model, called `name`, with another chat template.
pub(crate) fn model_with_template(name: &str, ctx_len: usize, template: &str) -> Served<Cpu> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sterna/models/tiny-tales");
    let plain: String = name.chars().filter(|c| c.is_alphanumeric()).collect();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("template-{plain}"));
    std::fs::create_dir_all(&folder).unwrap();
    for file in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ] {
        std::fs::copy(from.join(file), folder.join(file)).unwrap();
    }
    let config = std::fs::read(from.join("tokenizer_config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["chat_template"] = template.into();
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    let files = LocalModel::open(name, Located::at(&folder).unwrap(), None, None).unwrap();
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let session = SessionOptions::new(ctx_len);
    let served = Served::new(name, &files, plan, session, &mut Vec::new()).unwrap();
    served.with_weights(loaded(1))
}

/// The built-in model, loaded for `n` engines.
pub(crate) fn loaded(n: usize) -> Vec<Adapted<Cpu>> {
    let files = LocalModel::open(BUILTIN, builtin(), None, None).unwrap();
    load(&files, n)
}

/// The model of `files`, loaded for `n` engines.
fn load(files: &LocalModel, n: usize) -> Vec<Adapted<Cpu>> {
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let load_from = LoadFrom {
        weights: Weights::Mapped,
        experts: None,
        n_threads: 2,
        progress: &|_| {},
    };
    let load = |_| {
        let loaded = files.load_on(plan.clone(), Cpu::new(2, Isa::detect()), &load_from);
        Adapted::new(loaded.unwrap().model)
    };
    (0..n).map(load).collect()
}

/// The built-in model, called `name`, of which nothing is loaded until `load` does so.
pub(crate) fn unloaded(
    name: &str,
    load: impl Fn(&[usize]) -> sterna::Result<Vec<Adapted<Cpu>>> + Send + Sync + 'static,
) -> Served<Cpu> {
    let files = LocalModel::open(BUILTIN, builtin(), None, None).unwrap();
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let session = SessionOptions::new(4096);
    let served = Served::new(name, &files, plan, session, &mut Vec::new()).unwrap();
    served.with_loader(load)
}

/// A small random model whose layers have states, called `name`: each byte is a token.
pub(crate) fn states(name: &str) -> Served<Cpu> {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
        let weights = testdata.join("reference-states/hf/qwen3.5");
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("states");
        std::fs::create_dir_all(&folder).unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(weights.join(file), folder.join(file)).unwrap();
        }
        let own = ["<unk>", "<s>", "</s>"].map(str::to_owned);
        let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
        let vocab: serde_json::Map<String, Value> = (own.into_iter().chain(bytes).zip(0..))
            .map(|(token, id)| (token, Value::from(id)))
            .collect();
        let tokenizer = json!({
            "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true, "unk_token": "<unk>"},
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        });
        std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        folder
    });
    let files = LocalModel::open(name, Located::at(&FOLDER).unwrap(), None, None).unwrap();
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let session = SessionOptions::new(400);
    let served = Served::new(name, &files, plan, session, &mut Vec::new()).unwrap();
    served.with_weights(load(&files, 1))
}

/// A folder with an adapter of the built-in model, which makes its answers other ones; each `salt` has its own.
///
/// Tests that ask for the same salt share the folder. It is written once, as another one may be reading it.
pub(crate) fn adapter(salt: u32) -> PathBuf {
    static WRITTEN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("adapter-{salt}"));
    let mut written = WRITTEN.lock().unwrap();
    if written.insert(salt) {
        write_adapter(&folder, salt);
    }
    folder
}

fn write_adapter(folder: &Path, salt: u32) {
    const RANK: usize = 2;
    const WIDTH: usize = 256;
    const N_LAYERS: usize = 8;
    std::fs::create_dir_all(folder).unwrap();
    let config = json!({
        "peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj"],
    });
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    let (mut header, mut bytes) = (serde_json::Map::new(), Vec::new());
    let mut state = salt;
    for layer in 0..N_LAYERS {
        for module in ["q_proj", "o_proj"] {
            for (factor, shape) in [("A", [RANK, WIDTH]), ("B", [WIDTH, RANK])] {
                let name = format!(
                    "base_model.model.model.layers.{layer}.self_attn.{module}.lora_{factor}.weight"
                );
                let begin = bytes.len();
                for _ in 0..RANK * WIDTH {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let value = (state >> 8) as f32 / (1 << 24) as f32 - 0.5;
                    bytes.extend((value * 0.3).to_le_bytes());
                }
                let offsets = [begin, bytes.len()];
                let tensor = json!({"dtype": "F32", "shape": shape, "data_offsets": offsets});
                header.insert(name, tensor);
            }
        }
    }
    let header = Value::from(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(bytes);
    std::fs::write(folder.join("adapter_model.safetensors"), file).unwrap();
}

/// Opens the adapter at a path.
pub(crate) fn open(path: &str) -> Result<AdapterFiles, String> {
    let files = LocalFolder::new(Path::new(path));
    open_adapter(path, &files, None).map_err(|error| format!("{error:#}"))
}

/// A server with `settings`, which runs until the test does.
pub(crate) fn start(settings: Settings) -> Running {
    start_with(vec![model(BUILTIN, 4096)], settings)
}

/// The same, of these models.
pub(crate) fn start_with<B>(models: impl Into<Models<B>>, settings: Settings) -> Running
where
    B: Backend + 'static,
    Adapted<B>: Send + Sync,
    Model<B>: Send + Sync,
    ActiveAdapter<B>: Send,
{
    let server = Server::start(models, settings).unwrap();
    let router = server.router();
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            sender.send(listener.local_addr().unwrap()).unwrap();
            axum::serve(listener, router).await.unwrap();
        });
    });
    let address = receiver.recv().unwrap();
    Running { address, server }
}

/// The one that tests share which need no other.
pub(crate) fn shared() -> &'static Running {
    static SHARED: LazyLock<Running> = LazyLock::new(|| {
        start(Settings {
            engine: sterna_server::EngineOptions {
                queue: 512,
                ..Settings::default().engine
            },
            ..Settings::default()
        })
    });
    &SHARED
}

/// A response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(own, _)| own == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    /// The events of a stream, with their names; what isn't JSON is text.
    pub(crate) fn events(&self) -> Vec<(Option<String>, Value)> {
        let mut events = Vec::new();
        for block in self.text().split("\n\n").filter(|block| !block.is_empty()) {
            let (mut name, mut data) = (None, None);
            for line in block.lines() {
                if let Some(value) = line.strip_prefix("event: ") {
                    name = Some(value.to_owned());
                } else if let Some(value) = line.strip_prefix("data: ") {
                    let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
                    data = Some(value);
                }
            }
            // What keeps the connection has no data.
            events.extend(data.map(|data| (name, data)));
        }
        events
    }
}

impl Running {
    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        let patience = Duration::from_secs(300);
        stream.set_read_timeout(Some(patience)).unwrap();
        stream
    }

    /// Sends a request as it is; the whole response.
    pub(crate) fn raw(&self, head: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut stream = self.connect();
        send(&mut stream, head, headers, body);
        read(stream)
    }

    pub(crate) fn get(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.raw(&format!("GET {path}"), headers, b"")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_with(path, body, &[])
    }

    pub(crate) fn post_with(&self, path: &str, body: &Value, headers: &[(&str, &str)]) -> Answer {
        let mut all = vec![("Content-Type", "application/json")];
        all.extend(headers);
        self.raw(&format!("POST {path}"), &all, body.to_string().as_bytes())
    }

    /// The body of a response that has to be a success.
    pub(crate) fn ok(&self, path: &str, body: &Value) -> Value {
        let answer = self.post(path, body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    }
}

pub(crate) fn send(stream: &mut TcpStream, head: &str, headers: &[(&str, &str)], body: &[u8]) {
    let mut text = format!("{head} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n");
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    if !body.is_empty() {
        text += &format!("Content-Length: {}\r\n", body.len());
    }
    text += "\r\n";
    stream.write_all(text.as_bytes()).unwrap();
    // Who is refused early may not read all of it.
    let _ = stream.write_all(body);
}

pub(crate) fn read(stream: TcpStream) -> Answer {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).expect("a status").parse().unwrap();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    let is_chunked = headers
        .iter()
        .any(|(name, value)| name == "transfer-encoding" && value == "chunked");
    let mut body = Vec::new();
    if is_chunked {
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let len = usize::from_str_radix(line.trim(), 16).unwrap();
            let mut chunk = vec![0; len + 2];
            reader.read_exact(&mut chunk).unwrap();
            if len == 0 {
                break;
            }
            body.extend_from_slice(&chunk[..len]);
        }
    } else {
        // The connection may be reset after what was refused.
        let _ = reader.read_to_end(&mut body);
    }
    Answer {
        status,
        headers,
        body,
    }
}
