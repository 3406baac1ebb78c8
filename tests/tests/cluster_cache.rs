//! The cooperative cache on real processes: what it keeps, what it finds damaged, what it holds at
//! most, and what a changed source means. Faults of peers are in `cluster_cache_peers.rs`.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::ErrorCode;
use bafs_proto::fd_passing::HANDOFF_SOCKET_NAME;
use bafs_proto::message::JobOutcome;
use bafs_tests::api::CacheSpec;
use bafs_tests::cache_cluster::{CacheCluster, DATA_FILE, run_compare_job};
use bafs_tests::content::Content;
use bafs_tests::{mount_obstacle, report_skip};

const MIB: usize = 1 << 20;
const BLOCK_BYTES: usize = 64 << 10;

/// Where the blocks of a node's only cache volume are.
fn block_directory(stage: &CacheCluster, node: &str) -> Result<PathBuf> {
    let cache = stage
        .test_cluster
        .cluster
        .directory()
        .join(node)
        .join("cache");
    let mut volumes = fs::read_dir(cache)?;
    let volume = volumes.next().context("the node has a cache volume")??;
    let mut generations = fs::read_dir(volume.path())?.flatten();
    let is_generation = |entry: &fs::DirEntry| entry.path().join("blocks").is_dir();
    let generation = generations.find(is_generation);
    Ok(generation
        .context("it has a generation")?
        .path()
        .join("blocks"))
}

/// Waits until nodes have noted what they keep: a reader has the last blocks a moment before. A
/// note is some bytes of a journal, which grows no more then.
fn wait_until_recorded(stage: &CacheCluster, nodes: &[&str]) -> Result<()> {
    let noted = || -> Result<Vec<u64>> {
        let journals = nodes.iter().map(|node| block_directory(stage, node));
        let lengths =
            journals.map(|blocks| Ok(fs::metadata(blocks?.with_file_name("journal"))?.len()));
        lengths.collect()
    };
    let mut before = noted()?;
    for _ in 0..40 {
        std::thread::sleep(Duration::from_millis(500));
        let now = noted()?;
        if now == before && !now.contains(&0) {
            return Ok(());
        }
        before = now;
    }
    anyhow::bail!("the journals go on growing: {before:?}")
}

#[test]
fn cluster_cache_survives_killed_nodes_without_refetching() -> Result<()> {
    let content = Content::new(1, 8 * MIB);
    let mut stage = CacheCluster::start(2, "100MB", None)?;
    stage.write_data_set("kept", &content)?;
    let volumes =
        stage.create_caches(&stage.node_addresses(), &CacheSpec::new("kept", 16 << 20))?;
    stage.check_scan(&volumes[0], &content)?;
    let before = stage.read_home_bytes()?;
    ensure!(
        before == content.bytes().len() as u64,
        "home sent {before} bytes"
    );
    wait_until_recorded(&stage, &["n1", "n2"])?;
    for name in ["n1", "n2"] {
        stage.test_cluster.cluster.kill(name)?;
    }
    for name in ["n1", "n2"] {
        stage.test_cluster.cluster.restart(name)?;
    }
    stage.check_scan(&volumes[0], &content)?;
    let after = stage.read_home_bytes()?;
    ensure!(
        after == before,
        "home was asked again for {} bytes",
        after - before
    );
    Ok(())
}

#[test]
fn cluster_cache_finds_damaged_blocks_after_a_restart() -> Result<()> {
    let content = Content::new(2, 4 * MIB);
    let mut stage = CacheCluster::start(1, "100MB", None)?;
    stage.write_data_set("damaged", &content)?;
    let volumes = stage.create_caches(
        &stage.node_addresses(),
        &CacheSpec::new("damaged", 16 << 20),
    )?;
    stage.check_scan(&volumes[0], &content)?;
    let before = stage.read_home_bytes()?;
    wait_until_recorded(&stage, &["n1"])?;
    stage.test_cluster.cluster.kill("n1")?;
    let damaged = [0, 7, 31];
    let blocks = block_directory(&stage, "n1")?;
    for entry in fs::read_dir(&blocks)? {
        let file = OpenOptions::new().write(true).open(entry?.path())?;
        for block in damaged {
            file.write_all_at(b"damage", (block * BLOCK_BYTES + 100) as u64)?;
        }
    }
    stage.test_cluster.cluster.restart("n1")?;
    stage.check_scan(&volumes[0], &content)?;
    let fetched = stage.read_home_bytes()? - before;
    ensure!(
        fetched == (damaged.len() * BLOCK_BYTES) as u64,
        "home was asked for {fetched} bytes instead of the damaged ones"
    );
    let found = stage.sum_counter(&stage.node_addresses(), "cache_digest_failures")?;
    ensure!(
        found == damaged.len() as u64,
        "{found} damaged blocks were counted"
    );
    Ok(())
}

#[test]
fn cluster_cache_never_serves_damaged_blocks() -> Result<()> {
    let content = Content::new(3, 4 * MIB);
    let stage = CacheCluster::start(1, "100MB", None)?;
    stage.write_data_set("live", &content)?;
    let volumes =
        stage.create_caches(&stage.node_addresses(), &CacheSpec::new("live", 16 << 20))?;
    stage.check_scan(&volumes[0], &content)?;
    if let Some(reason) = mount_obstacle() {
        report_skip("cluster_cache_never_serves_damaged_blocks", &reason);
        return Ok(());
    }
    let (volume, script) = (&volumes[0], stage.compare_script("live"));
    let api_client = stage.client.client();
    let handoff = stage
        .test_cluster
        .cluster
        .directory()
        .join("n1")
        .join(HANDOFF_SOCKET_NAME);
    for round in 1..=2 {
        if round == 2 {
            // An agent that the node hands nothing over to, or that has lost it with the node's
            // former life, asks through the network.
            fs::rename(&handoff, handoff.with_extension("away"))?;
        }
        for entry in fs::read_dir(block_directory(&stage, "n1")?)? {
            let file = OpenOptions::new().write(true).open(entry?.path())?;
            file.write_all_at(b"damage", (9 * BLOCK_BYTES) as u64)?;
        }
        let job = api_client.start_job(&volume.node, volume.mount_target(), &script);
        let report = stage
            .client
            .block_on(async { api_client.wait_for_job(&volume.node, job.await?).await })?;
        let said = report.output_tail.trim();
        ensure!(
            report.outcome == JobOutcome::Exited(0) && said == "0",
            "round {round}: {:?}: {said}",
            report.outcome
        );
        let found = stage.sum_counter(&stage.node_addresses(), "cache_digest_failures")?;
        ensure!(
            found == round,
            "round {round}: {found} damaged blocks were counted"
        );
    }
    Ok(())
}

#[test]
fn cluster_cache_repairs_damage_under_an_open_file() -> Result<()> {
    let name = "cluster_cache_repairs_damage_under_an_open_file";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    let content = Content::new(5, 16 * MIB);
    let stage = CacheCluster::start(2, "100MB", None)?;
    stage.write_data_set("open", &content)?;
    let volumes =
        stage.create_caches(&stage.node_addresses(), &CacheSpec::new("open", 32 << 20))?;
    let signs = tempfile::tempdir()?;
    let (read, damaged) = (signs.path().join("read"), signs.path().join("damaged"));
    // The first descriptor reads a part; the second one, as old, reads the same once the kernel has
    // forgotten it.
    let original = stage.test_cluster.home.path().join("open").join(DATA_FILE);
    let script = format!(
        "exec 3</data/{DATA_FILE} 4</data/{DATA_FILE}; head -c 4M <&3 >/dev/null; touch {}; \
         until test -e {}; do sleep 0.05; done; dd iflag=nocache count=0 <&4 2>/dev/null; \
         head -c 4M <&4 | cmp -n 4194304 - {} && echo same",
        read.display(),
        damaged.display(),
        original.display()
    );
    let (api_client, volume) = (stage.client.client(), &volumes[0]);
    let job = stage.client.block_on(api_client.start_job(
        &volume.node,
        volume.mount_target(),
        &script,
    ))?;
    for _ in 0..600 {
        if read.exists() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    ensure!(read.exists(), "the job has read nothing");
    for entry in fs::read_dir(block_directory(&stage, "n1")?)? {
        let file = OpenOptions::new().write(true).open(entry?.path())?;
        for block in 0..4 * MIB / BLOCK_BYTES {
            file.write_all_at(b"damage", (block * BLOCK_BYTES + 100) as u64)?;
        }
    }
    fs::write(&damaged, b"")?;
    let report = stage
        .client
        .block_on(api_client.wait_for_job(&volume.node, job))?;
    let said = report.output_tail.trim();
    ensure!(
        report.outcome == JobOutcome::Exited(0) && said == "same",
        "{:?}: {said}",
        report.outcome
    );
    let found = stage.sum_counter(&stage.node_addresses(), "cache_digest_failures")?;
    ensure!(found > 0, "the damage was not seen: nothing was tested");
    Ok(())
}

/// ext4 lists the pieces of a fragmented file in a block of its own, which `du` counts too.
const EXTENT_LIST_BYTES: u64 = 4096;

/// Bytes that files below a directory take on disk.
fn disk_usage_bytes(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let taken = entries.map(|entry| {
        let found = entry.metadata().ok();
        found.map_or(0, |found| match found.is_dir() {
            true => disk_usage_bytes(&entry.path()),
            false => found.blocks() * 512,
        })
    });
    taken.sum()
}

#[test]
fn cluster_cache_keeps_its_maximum_under_64_readers() -> Result<()> {
    let content = Arc::new(Content::new(4, 24 * MIB));
    let size_bytes = 4 << 20;
    let stage = CacheCluster::start(2, "100MB", None)?;
    stage.write_data_set("small", &content)?;
    let volumes = stage.create_caches(
        &stage.node_addresses(),
        &CacheSpec::new("small", size_bytes),
    )?;
    let places = [
        block_directory(&stage, "n1")?,
        block_directory(&stage, "n2")?,
    ];
    let over = AtomicBool::new(false);
    let (samples, largest) = std::thread::scope(|scope| -> Result<_> {
        let sampling = scope.spawn(|| {
            let (mut samples, mut largest) = (0u32, 0);
            while !over.load(Ordering::Relaxed) {
                let taken = places.iter().map(|place| disk_usage_bytes(place)).max();
                largest = largest.max(taken.unwrap_or(0));
                samples += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
            (samples, largest)
        });
        let readers = (0..64).map(|reader| {
            let (api_client, volume) = (stage.new_reader(), volumes[reader % 2].clone());
            let content = content.clone();
            async move {
                let api_client = api_client?;
                let listing = api_client.list_files(&volume).await?;
                let (file, _) = listing.regular_files().next().context("a file")?;
                let blocks = (content.bytes().len() / BLOCK_BYTES) as u64;
                for step in 0..12 {
                    // Each reader its own way through the file, no two at the same place.
                    let first = (step * 37 + reader as u64 * 61) % blocks;
                    let bytes = api_client
                        .read_blocks(&volume, &listing, file, first, 4)
                        .await?;
                    let wrong = content.count_wrong_bytes(first * BLOCK_BYTES as u64, &bytes);
                    ensure!(wrong == 0, "{wrong} wrong bytes from block {first} on");
                }
                Ok(())
            }
        });
        let read = stage.client.run_all(readers.collect::<Vec<_>>());
        over.store(true, Ordering::Relaxed);
        let sampled = sampling.join().ok().context("sampling broke off")?;
        read.map(|_| sampled)
    })?;
    ensure!(samples > 10, "only {samples} samples were taken");
    ensure!(
        largest <= size_bytes + EXTENT_LIST_BYTES,
        "{largest} bytes were on disk, {size_bytes} are allowed"
    );
    ensure!(
        largest > size_bytes / 2,
        "the cache was not under pressure: {largest} bytes"
    );
    let evicted = stage.sum_counter(&stage.node_addresses(), "cache_evicted_primary")?;
    ensure!(evicted > 0, "nothing was evicted");
    Ok(())
}

#[test]
fn cluster_cache_ends_jobs_whose_source_changed() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("cluster_cache_ends_jobs_whose_source_changed", &reason);
        return Ok(());
    }
    let (old, new) = (Content::new(5, 4 * MIB), Content::new(6, 4 * MIB));
    let stage = CacheCluster::start(2, "100MB", None)?;
    stage.write_data_set("changing", &old)?;
    let volumes = stage.create_caches(
        &stage.node_addresses(),
        &CacheSpec::new("changing", 16 << 20),
    )?;
    let signs = tempfile::tempdir()?;
    let (began, go) = (signs.path().join("began"), signs.path().join("go"));
    let script = format!(
        "head -c 1000000 /data/{DATA_FILE} >/dev/null; touch {}; while ! test -e {}; do sleep \
         0.05; done; cat /data/{DATA_FILE} | cksum",
        began.display(),
        go.display()
    );
    let api_client = stage.client.client().clone();
    let jobs = volumes.iter().map(|volume| {
        let start = api_client.start_job(&volume.node, volume.mount_target(), &script);
        Ok((volume.node.clone(), stage.client.block_on(start)?))
    });
    let jobs: Vec<_> = jobs.collect::<Result<_>>()?;
    for _ in 0..400 {
        if began.exists() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    stage.write_data_set("changing", &new)?;
    fs::write(&go, b"")?;
    for (node, job) in jobs {
        let report = stage.client.block_on(api_client.wait_for_job(&node, job))?;
        match report.outcome {
            JobOutcome::EnvironmentFailed(error) => {
                ensure!(error.code == ErrorCode::SourceChanged, "{error}");
                ensure!(
                    error.detail.contains(DATA_FILE),
                    "which file is not told: {error}"
                );
            }
            other => anyhow::bail!("the job ended with {other:?}: {}", report.output_tail),
        }
    }
    Ok(())
}

#[test]
fn cluster_cache_serves_new_content_after_invalidation() -> Result<()> {
    let (old, new) = (Content::new(7, 2 * MIB), Content::new(8, 2 * MIB));
    let rest = Content::new(9, 3 * MIB);
    let stage = CacheCluster::start(2, "100MB", None)?;
    stage.write_data_set("fresh", &old)?;
    rest.write_file(&stage.test_cluster.home.path().join("fresh/zz-same.bin"))?;
    let volumes =
        stage.create_caches(&stage.node_addresses(), &CacheSpec::new("fresh", 16 << 20))?;
    let check = |expected: &Content| -> Result<()> {
        let api_client = stage.client.client();
        let mut wrong = 0;
        for volume in &volumes {
            stage
                .client
                .block_on(api_client.scan_files(volume, |path, offset, found| {
                    let content = if path == DATA_FILE { expected } else { &rest };
                    wrong += content.count_wrong_bytes(offset, found);
                }))?;
        }
        ensure!(wrong == 0, "{wrong} bytes are wrong");
        Ok(())
    };
    check(&old)?;
    let stale = stage
        .client
        .block_on(stage.client.client().list_files(&volumes[0]))?;
    stage.write_data_set("fresh", &new)?;
    let before = stage.read_home_bytes()?;
    for volume in &volumes {
        stage
            .client
            .block_on(stage.client.client().invalidate_cache(volume))?;
    }
    check(&new)?;
    let fetched = stage.read_home_bytes()? - before;
    let changed = new.bytes().len() as u64;
    ensure!(
        fetched == changed,
        "home sent {fetched} bytes; {changed} had changed"
    );
    let (file, _) = stale.regular_files().next().context("a file")?;
    let read = stage
        .client
        .client()
        .read_blocks(&volumes[0], &stale, file, 0, 1);
    let error = stage
        .client
        .block_on(read)
        .err()
        .context("a reader of the old state is told")?;
    let error = error.downcast::<bafs_proto::Error>()?;
    ensure!(error.code == ErrorCode::SourceChanged, "{error}");
    Ok(())
}

#[test]
fn cluster_cache_fetches_bytes_once_for_all_readers() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("cluster_cache_fetches_bytes_once_for_all_readers", &reason);
        return Ok(());
    }
    let content = Arc::new(Content::new(10, 6 * MIB));
    let stage = CacheCluster::start(4, "100MB", Some("6MB/s"))?;
    stage.write_data_set("shared", &content)?;
    let volumes =
        stage.create_caches(&stage.node_addresses(), &CacheSpec::new("shared", 16 << 20))?;
    let script = stage.compare_script("shared");
    let jobs = volumes.iter().flat_map(|volume| {
        let job = || {
            let (api_client, volume) = (stage.client.client().clone(), volume.clone());
            let target = volume.mount_target();
            run_compare_job(api_client, volume.node, target, script.clone())
        };
        [job(), job()]
    });
    let wrong: u64 = stage
        .client
        .run_all(jobs.collect::<Vec<_>>())?
        .into_iter()
        .sum();
    ensure!(wrong == 0, "{wrong} bytes are wrong");
    let (sent, needed) = (stage.read_home_bytes()?, content.bytes().len() as u64);
    ensure!(
        sent == needed,
        "home sent {sent} bytes, {needed} are needed"
    );
    Ok(())
}
