//! What verification costs compared with everything else that a fetch does.

use std::{
    env, fs,
    io::{BufRead as _, BufReader, Read as _},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use sterna_delivery::{
    fetch::{Blob, Cancel, FolderSink, Limits, fetch},
    hash::{Algorithm, BlockDigests, DEFAULT_BLOCK_SIZE, Expected, Hasher, digest_of},
    source::{HttpOptions, HttpSource, Url},
};

use crate::server::{Files, Server, bytes};

const SERVE: &str = "STERNA_TEST_COST_SERVER";
const N_FILES: usize = 4;
const SIZE: usize = 64 << 20;
const ROUNDS: usize = 7;

fn some_files() -> Files {
    let file = |i: usize| (format!("shard_{i:05}.bin"), bytes(i as u64 + 1, SIZE));
    (0..N_FILES)
        .map(file)
        .collect::<std::collections::BTreeMap<_, _>>()
        .into()
}

/// Not a test, but the server process of the measurement.
#[test]
fn server() {
    if env::var(SERVE).is_ok() {
        let server = Server::honest(&some_files());
        println!("at {}", server.url());
        // Until the other side is done.
        let _ = std::io::stdin().read(&mut [0]);
    }
}

/// Processor time that this process has taken.
fn cpu_time() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Run with `cargo test -p sterna-delivery --test fetch_net cost -- --ignored --nocapture`, on an idle
/// machine. The ways are taken in turn, so that what disturbs one disturbs all.
#[test]
#[ignore = "a measurement: a gigabyte over loopback, several times"]
fn verification_beside_a_pull() {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "cost::server", "--nocapture"])
        .env(SERVE, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let url = BufReader::new(child.stdout.as_mut().unwrap())
        .lines()
        .find_map(|line| Some(line.unwrap().split_once("at http")?.1.to_owned()))
        .unwrap();
    let url = Url::parse(&format!("http{url}")).unwrap();
    let files = some_files();
    for algorithm in Algorithm::ALL {
        let mut hasher = Hasher::new(algorithm);
        let began = cpu_time();
        (0..4).for_each(|_| files.values().for_each(|bytes| hasher.update(bytes)));
        let rate = (4 * N_FILES * SIZE) as f64 / (cpu_time() - began).as_secs_f64() / 1e9;
        println!(
            "{algorithm}: {rate:.2} GB/s on one core ({:?})",
            hasher.finish()
        );
    }
    let with = |whole: Option<Algorithm>, block: Option<Algorithm>| -> Vec<Blob> {
        (files.iter())
            .map(|(name, bytes)| {
                let expected = whole.map_or(Expected::SizeOnly, |algorithm| {
                    Expected::Digest(digest_of(algorithm, bytes))
                });
                let blob = Blob::new(name, bytes.len() as u64, expected).unwrap();
                match block {
                    Some(algorithm) => {
                        let blocks = BlockDigests::of(algorithm, DEFAULT_BLOCK_SIZE, bytes);
                        blob.with_blocks(blocks.unwrap()).unwrap()
                    }
                    None => blob,
                }
            })
            .collect()
    };
    let (sha256, blake3) = (Some(Algorithm::Sha256), Some(Algorithm::Blake3));
    let ways = [
        ("no digest", with(None, None)),
        ("sha256", with(sha256, None)),
        ("blake3", with(blake3, None)),
        ("sha256, blocks sha256", with(sha256, sha256)),
        ("sha256, blocks blake3", with(sha256, blake3)),
        ("blake3, blocks blake3", with(blake3, blake3)),
    ];
    let mut times = vec![(vec![], vec![]); ways.len()];
    for _ in 0..ROUNDS {
        for ((_, blobs), (wall, cpu)) in ways.iter().zip(&mut times) {
            let dir = tempfile::tempdir().unwrap();
            let options = HttpOptions {
                proxy_from_env: false,
                ..HttpOptions::default()
            };
            let (source, sink) = (
                HttpSource::new(url.clone(), options),
                FolderSink::new(dir.path()),
            );
            let (began, cpu_began) = (Instant::now(), cpu_time());
            fetch(
                blobs.clone(),
                &[&source],
                &sink,
                Limits::default(),
                &Cancel::new(),
                &mut |_| {},
            )
            .unwrap();
            wall.push(began.elapsed().as_secs_f64());
            cpu.push((cpu_time() - cpu_began).as_secs_f64());
        }
    }
    drop(child.stdin.take());
    child.wait().unwrap();
    let base = median(times[0].0.clone());
    for ((name, _), (wall, cpu)) in ways.iter().zip(times) {
        let (wall, cpu) = (median(wall), median(cpu));
        println!(
            "{name:22} {wall:.3} s ({:+.0} %), {cpu:.2} s of processor time",
            (wall / base - 1.0) * 100.0
        );
    }
}
