//! Blocks that a peer has, read over loopback, beside a bare QUIC stream that moves as many bytes
//! between two processes with the same TLS and transport configuration.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::identity::{Identity, SERVER_NAME};
use bafs_proto::message::Role;
use bafs_proto::net::quic;
use bytes::Bytes;

use super::part_outcome::{MIB, PartOutcome};
use crate::api::{ApiClient, CacheSpec, CacheVolume, READ_BYTES_MAX};
use crate::bench::machine::warm_memory;
use crate::bench::measure::{BenchmarkVariant, run_interleaved, table_row, time_seconds};
use crate::bench::shell::Shell;
use crate::bench::{BenchmarkReport, Options};
use crate::cache_cluster::{CacheCluster, DATA_FILE};
use crate::content::Content;

/// Hidden first argument: this process sends bytes over a bare QUIC stream.
pub(in crate::bench) const SOURCE_PROCESS: &str = "--quic-source";

/// Requests in progress at once, as with a kernel's read-ahead.
const CONCURRENT_REQUESTS: u64 = 4;

/// Memory to touch first, in bytes: a peer's data is kept in memory, and the bare stream keeps
/// nothing.
const WARM_MEMORY_BYTES: usize = 8 << 30;

/// Cold reads from a peer, and the bare stream.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<PartOutcome> {
    let set = MIB * options.choose(256, 64);
    let content = Content::new(3, set);
    if let Some(reason) = crate::mount_obstacle() {
        anyhow::bail!("jobs with volumes cannot run here: {reason}");
    }
    let stage = CacheCluster::start(2, "20GB", None)?;
    stage.write_data_set("peer", &content)?;
    let source = StreamSource::start(&stage.test_cluster.cluster.identity(), set)?;
    report.print_section(&format!(
        "{} MiB that only a peer has, over loopback",
        set / MIB
    ));
    let serial = std::cell::Cell::new(0);
    let (mut wrong, mut peer_wrong) = (0, 0);
    let mut ways = [
        BenchmarkVariant::new("bare QUIC stream", || source.fetch(&stage, set)),
        BenchmarkVariant::new("cold from a peer, by a program in a job", || {
            serial.set(serial.get() + 1);
            let name = format!("peer-{}", serial.get());
            let read = |volume: &CacheVolume| read_in_job(&stage, volume, set);
            read_from_peer(&stage, &name, &content, read)
        }),
        BenchmarkVariant::new("cold from a peer, by the volume API", || {
            serial.set(serial.get() + 1);
            let name = format!("peer-{}", serial.get());
            let read = |volume: &CacheVolume| {
                let (rate, bad) = read_all(&stage, volume, &content)?;
                wrong += bad;
                Ok(rate)
            };
            read_from_peer(&stage, &name, &content, read)
        }),
        BenchmarkVariant::new("warm from the own node", || {
            let (rate, bad) = read_own_cache(&stage, &content)?;
            peer_wrong += bad;
            Ok(rate)
        }),
    ];
    warm_memory(options.choose(WARM_MEMORY_BYTES, 0));
    let samples = run_interleaved(options.choose(5, 2), &mut ways)?;
    let names: Vec<_> = ways.iter().map(|way| way.name.to_owned()).collect();
    drop(ways);
    let mut rows = vec![table_row(["way", "MB/s", "ratio to the bare stream"])];
    for (name, rate) in names.iter().zip(&samples) {
        let ratio = rate.ratio_to(&samples[0]);
        rows.push(table_row([name, &rate.to_string(), &ratio.to_string()]));
    }
    report.print_table(&rows);
    report.add_samples("peer_vs_quinn", &samples[1].ratio_to(&samples[0]));
    report.add_samples("peer_by_api_vs_quinn", &samples[2].ratio_to(&samples[0]));
    Ok(PartOutcome {
        wrong_bytes: wrong + peer_wrong,
    })
}

/// Has everything on the first node, makes the second one a peer, and reads there.
fn read_from_peer(
    stage: &CacheCluster,
    cooperative: &str,
    content: &Content,
    mut read: impl FnMut(&CacheVolume) -> Result<f64>,
) -> Result<f64> {
    let spec = CacheSpec {
        cooperative: cooperative.to_owned(),
        ..CacheSpec::new("peer", 2 * content.bytes().len() as u64)
    };
    let nodes = stage.node_addresses();
    let first = stage.create_caches(&nodes[..1], &spec)?;
    let compared = || stage.sum_counter(&nodes[..1], "cache_whole_files_verified");
    let before = compared()?;
    read_all(stage, &first[0], content)?;
    // Else the first node would still be at its own work, which takes a processor.
    let mut looks = 2_000;
    while compared()? == before {
        looks -= 1;
        ensure!(looks > 0, "the first node does not compare what it has");
        std::thread::sleep(Duration::from_millis(10));
    }
    let second = stage.create_caches(&nodes[1..], &spec)?;
    let before = stage.read_home_bytes()?;
    let rate = read(&second[0])?;
    let home_bytes = stage.read_home_bytes()? - before;
    ensure!(
        home_bytes == 0,
        "{home_bytes} bytes came from home, not from the peer"
    );
    stage.delete_volumes(&[first, second].concat())?;
    Ok(rate)
}

/// Reads the data file by fio in a job on the volume's node: MB/s. The bytes are compared by the
/// way through the volume API, and by the kernel's reader in the fault tests.
fn read_in_job(stage: &CacheCluster, volume: &CacheVolume, set: usize) -> Result<f64> {
    let mut shell = Shell::start_in_job(&stage.test_cluster, &format!("{}:/data:ro", volume.id))?;
    shell.run_line("true")?;
    let options = format!(
        "--name=read --filename=/data/{DATA_FILE} --readonly --invalidate=0 --size={set} \
         --ioengine=psync --rw=read --bs=1M"
    );
    shell.run_fio(&options, set as u64)
}

/// Reads data of the own node.
fn read_own_cache(stage: &CacheCluster, content: &Content) -> Result<(f64, u64)> {
    let spec = CacheSpec {
        cooperative: String::new(),
        ..CacheSpec::new("peer", 2 * content.bytes().len() as u64)
    };
    let volumes = stage.create_caches(&stage.node_addresses()[..1], &spec)?;
    read_all(stage, &volumes[0], content)?;
    let found = read_all(stage, &volumes[0], content)?;
    stage.delete_volumes(&volumes)?;
    Ok(found)
}

/// Reads the data file with several requests at once: MB/s and wrong bytes.
fn read_all(stage: &CacheCluster, volume: &CacheVolume, content: &Content) -> Result<(f64, u64)> {
    let reader = stage.new_reader()?;
    let length = content.bytes().len() as u64;
    let (time, wrong) =
        time_seconds(|| stage.client.block_on(read_chunks(&reader, volume, content)))?;
    Ok((length as f64 / time / 1e6, wrong))
}

async fn read_chunks(reader: &ApiClient, volume: &CacheVolume, content: &Content) -> Result<u64> {
    let listing = reader.list_files(volume).await?;
    let file = listing
        .regular_files()
        .find(|(_, entry)| entry.path == DATA_FILE);
    let (file, _) = file.context("the data file is listed")?;
    let pieces = (content.bytes().len() as u64).div_ceil(u64::from(READ_BYTES_MAX));
    let step = READ_BYTES_MAX / listing.block_bytes;
    let read = |piece: u64| {
        let (reader, volume, listing) = (reader.clone(), volume.clone(), listing.clone());
        let first = piece * u64::from(step);
        tokio::spawn(async move {
            let bytes = reader
                .read_blocks(&volume, &listing, file, first, step)
                .await?;
            anyhow::Ok((piece * u64::from(READ_BYTES_MAX), bytes))
        })
    };
    let mut under_way: std::collections::VecDeque<_> =
        (0..CONCURRENT_REQUESTS.min(pieces)).map(&read).collect();
    let (mut next, mut wrong) = (under_way.len() as u64, 0);
    while let Some(oldest) = under_way.pop_front() {
        let (offset, bytes) = oldest.await??;
        if next < pieces {
            under_way.push_back(read(next));
            next += 1;
        }
        wrong += content.count_wrong_bytes(offset, &bytes);
    }
    Ok(wrong)
}

/// Another process that sends bytes.
struct StreamSource {
    child: Child,
    address: String,
    identity: PathBuf,
}

impl StreamSource {
    fn start(identity: &Path, bytes: usize) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(SOURCE_PROCESS)
            .arg(identity)
            .arg(bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("standard output is piped")?;
        let mut address = String::new();
        BufReader::new(stdout).read_line(&mut address)?;
        Ok(Self {
            child,
            address: address.trim().to_owned(),
            identity: identity.to_owned(),
        })
    }

    /// Fetches everything once: MB/s.
    fn fetch(&self, stage: &CacheCluster, bytes: usize) -> Result<f64> {
        let identity = Identity::load(&self.identity.join("scheduler"), Role::Scheduler)?;
        stage.client.block_on(async {
            let endpoint = quic::client_endpoint(&identity)?;
            let address = self.address.parse()?;
            let connection = endpoint.connect(address, SERVER_NAME)?.await?;
            let watch = crate::bench::measure::Stopwatch::start();
            let (mut send, mut receive) = connection.open_bi().await?;
            send.write_all(b"go").await?;
            send.finish()?;
            let mut received = 0;
            while let Some(chunk) = receive.read_chunk(usize::MAX, true).await? {
                received += chunk.bytes.len();
            }
            ensure!(received == bytes, "{received} of {bytes} bytes came");
            Ok(bytes as f64 / watch.elapsed().as_secs_f64() / 1e6)
        })
    }
}

impl Drop for StreamSource {
    fn drop(&mut self) {
        // It ends with its standard input.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Is the other end of a bare stream until standard input ends. Arguments: identity, bytes.
pub(in crate::bench) fn run_source_process(arguments: &[String]) -> Result<()> {
    let [identity, bytes] = arguments else {
        anyhow::bail!("a source needs an identity and a number of bytes");
    };
    let identity = Identity::load(&Path::new(identity).join("server"), Role::Server)?;
    let bytes: usize = bytes.parse()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let endpoint = {
        let _inside = runtime.enter();
        quic::server_endpoint("127.0.0.1:0", &identity)?
    };
    println!("{}", endpoint.local_addr()?);
    std::io::stdout().flush()?;
    runtime.spawn(async move {
        while let Some(incoming) = endpoint.accept().await {
            tokio::spawn(async move {
                let connection = incoming.await?;
                let (mut send, mut receive) = connection.accept_bi().await?;
                receive.read_to_end(16).await?;
                let piece = Bytes::from(vec![7; READ_BYTES_MAX as usize]);
                let mut left = bytes;
                while left > 0 {
                    let now = left.min(piece.len());
                    send.write_chunk(piece.slice(..now)).await?;
                    left -= now;
                }
                send.finish()?;
                connection.closed().await;
                anyhow::Ok(())
            });
        }
    });
    std::io::stdin().read_to_end(&mut Vec::new())?;
    runtime.shutdown_background();
    Ok(())
}
