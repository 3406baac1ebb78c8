//! The cooperative cache on real processes in bad hours: homes that go away, nodes that all die
//! while they fill, stores that were tampered with, jobs on a state of the source that is over.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::ErrorCode;
use bafs_proto::message::JobOutcome;
use bafs_tests::api::{CacheSpec, CacheVolume};
use bafs_tests::cache_cluster::{CacheCluster, DATA_FILE, count_wrong_bytes};
use bafs_tests::content::Content;
use bafs_tests::{mount_obstacle, report_skip};

const MIB: usize = 1 << 20;
const BLOCK_BYTES: usize = 64 << 10;

/// Readers of everything, one on each volume; returns the wrong bytes that all saw.
fn read_on_all_volumes(
    stage: &CacheCluster,
    volumes: &[CacheVolume],
    content: &Arc<Content>,
) -> Result<Vec<impl Future<Output = Result<u64>> + Send + use<>>> {
    let reader = |volume: &CacheVolume| {
        let (api_client, volume, content) = (stage.new_reader()?, volume.clone(), content.clone());
        Ok(async move { count_wrong_bytes(api_client, volume, &content).await })
    };
    volumes.iter().map(reader).collect()
}

/// Waits until home has sent so many bytes: the reads are under way.
fn wait_for_home_bytes(stage: &CacheCluster, bytes: u64) -> Result<()> {
    for _ in 0..400 {
        if stage.read_home_bytes()? >= bytes {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(25));
    }
    anyhow::bail!("home sent less than {bytes} bytes in ten seconds")
}

#[test]
fn cluster_cache_waits_for_home_without_refetching() -> Result<()> {
    let content = Arc::new(Content::new(41, 12 * MIB));
    let needed = content.bytes().len() as u64;
    let mut stage = CacheCluster::start(4, "100MB", Some("4MB/s"))?;
    stage.write_data_set("away", &content)?;
    let volumes =
        stage.create_caches(&stage.node_addresses(), &CacheSpec::new("away", 32 << 20))?;
    let readers = read_on_all_volumes(&stage, &volumes, &content)?;
    let wrong: u64 = std::thread::scope(|scope| -> Result<_> {
        let reading = scope.spawn({
            let api = &stage.client;
            move || api.run_all(readers)
        });
        wait_for_home_bytes(&stage, needed / 4)?;
        let cluster = &mut stage.test_cluster.cluster;
        cluster.kill("home")?;
        std::thread::sleep(Duration::from_millis(5_000));
        cluster.restart("home")?;
        let read = reading.join().ok().context("who reads broke off")?;
        Ok(read?.into_iter().sum())
    })?;
    ensure!(wrong == 0, "{wrong} bytes are wrong");
    let came = stage.sum_counter(&stage.node_addresses(), "cache_home_bytes")?;
    ensure!(
        came == needed,
        "{came} bytes came from home, {needed} are needed"
    );
    let fallbacks = stage.sum_counter(&stage.node_addresses(), "cache_fallbacks")?;
    ensure!(
        fallbacks == 0,
        "{fallbacks} times a living peer was passed over"
    );
    Ok(())
}

/// The files of the only cache volume of a node: its journal, and those with blocks.
fn cache_files(stage: &CacheCluster, node: &str) -> Result<(PathBuf, Vec<PathBuf>)> {
    let cache = stage
        .test_cluster
        .cluster
        .directory()
        .join(node)
        .join("cache");
    let volume = fs::read_dir(cache)?.next().context("a cache volume")??;
    let mut generations = fs::read_dir(volume.path())?.flatten();
    let generation = generations
        .find(|entry| entry.path().join("blocks").is_dir())
        .context("a generation")?
        .path();
    let blocks = fs::read_dir(generation.join("blocks"))?;
    let blocks = blocks.map(|entry| Ok(entry?.path()));
    Ok((generation.join("journal"), blocks.collect::<Result<_>>()?))
}

#[test]
fn cluster_cache_survives_node_losses_and_tampered_stores() -> Result<()> {
    let content = Arc::new(Content::new(42, 16 * MIB));
    let needed = content.bytes().len() as u64;
    let mut stage = CacheCluster::start(3, "100MB", Some("8MB/s"))?;
    stage.write_data_set("hostile", &content)?;
    let volumes = stage.create_caches(
        &stage.node_addresses(),
        &CacheSpec::new("hostile", 32 << 20),
    )?;
    let readers = read_on_all_volumes(&stage, &volumes, &content)?;
    let names = ["n1", "n2", "n3"];
    let tampered = std::thread::scope(|scope| -> Result<_> {
        let api = &stage.client;
        let reading = scope.spawn(move || api.run_all(readers));
        wait_for_home_bytes(&stage, needed / 2)?;
        for name in names {
            stage.test_cluster.cluster.kill(name)?;
        }
        // The first has lost the end of its journal, at a byte that ends no record.
        let (journal, _) = cache_files(&stage, "n1")?;
        let length = fs::metadata(&journal)?.len();
        OpenOptions::new()
            .write(true)
            .open(&journal)?
            .set_len(length / 2 + 7)?;
        // The second has other bytes in its blocks, the third a block too many.
        let (_, blocks) = cache_files(&stage, "n2")?;
        for path in &blocks {
            let file = OpenOptions::new().write(true).open(path)?;
            for block in (0..needed as usize / BLOCK_BYTES).step_by(3) {
                file.write_all_at(b"tampered", (block * BLOCK_BYTES + 999) as u64)?;
            }
        }
        let (_, blocks) = cache_files(&stage, "n3")?;
        for path in &blocks {
            let file = OpenOptions::new().write(true).open(path)?;
            file.write_all_at(&[7; BLOCK_BYTES], needed)?;
        }
        for name in names {
            stage.test_cluster.cluster.restart(name)?;
        }
        let read = reading.join().ok().context("who reads broke off")?;
        Ok(read?.into_iter().sum::<u64>())
    })?;
    ensure!(tampered == 0, "{tampered} bytes are wrong");
    let again = stage
        .client
        .run_all(read_on_all_volumes(&stage, &volumes, &content)?)?;
    ensure!(again.iter().sum::<u64>() == 0, "bytes are wrong: {again:?}");
    let found = stage.sum_counter(&stage.node_addresses(), "cache_digest_failures")?;
    ensure!(found > 0, "nothing was tampered with: nothing was tested");
    Ok(())
}

#[test]
fn cluster_cache_ends_jobs_after_invalidation() -> Result<()> {
    let name = "cluster_cache_ends_jobs_after_invalidation";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    let (old, new) = (Content::new(43, 4 * MIB), Content::new(44, 4 * MIB));
    let stage = CacheCluster::start(1, "100MB", None)?;
    stage.write_data_set("renewed", &old)?;
    let volumes = stage.create_caches(
        &stage.node_addresses(),
        &CacheSpec::new("renewed", 16 << 20),
    )?;
    let signs = tempfile::tempdir()?;
    let began = signs.path().join("began");
    // It has read something of the old state, and would never end by itself.
    let script = format!(
        "head -c 3000000 /data/{DATA_FILE} >/dev/null; touch {}; while :; do sleep 0.1; done",
        began.display()
    );
    let (api_client, volume) = (stage.client.client(), &volumes[0]);
    let started = api_client.start_job(&volume.node, volume.mount_target(), &script);
    let job = stage.client.block_on(started)?;
    for _ in 0..400 {
        if began.exists() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    ensure!(began.exists(), "the job has read nothing of the old state");
    stage.write_data_set("renewed", &new)?;
    stage.client.block_on(api_client.invalidate_cache(volume))?;
    let report = stage
        .client
        .block_on(api_client.wait_for_job(&volume.node, job))?;
    match report.outcome {
        JobOutcome::EnvironmentFailed(error) => {
            ensure!(error.code == ErrorCode::SourceChanged, "{error}");
        }
        other => anyhow::bail!("the job ended with {other:?}: {}", report.output_tail),
    }
    let wrong =
        stage
            .client
            .block_on(count_wrong_bytes(stage.new_reader()?, volume.clone(), &new))?;
    ensure!(wrong == 0, "{wrong} bytes of the new state are wrong");
    Ok(())
}
