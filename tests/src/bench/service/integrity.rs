//! What a lying node does to others, and what it costs to find that out.

use anyhow::{Result, ensure};

use super::super::measure::{BenchmarkVariant, run_interleaved, time_seconds};
use super::super::{BenchmarkReport, Options};
use super::lying_node::LyingNode;
use crate::api::{CacheSpec, CacheVolume};
use crate::cache_cluster::CacheCluster;
use crate::content::Content;

/// Block size of the caches here.
pub(super) const BLOCK_BYTES: usize = 64 << 10;

/// The data that a liar sends.
const POISON_BYTES: usize = 8 << 20;

/// The data of a cold read, and the link that it comes over.
const COLD_BYTES: usize = 32 << 20;
const LINK_RATE: &str = "20MB/s";

/// Reads of blocks that gave other bytes than home has: of nodes that ask home what the blocks are.
/// A node that trusts its peers shows that the liar lies.
pub(super) fn measure_poisoning(report: &mut BenchmarkReport) -> Result<()> {
    report.print_section("reads of blocks of a node that sends other bytes");
    let mut stage = CacheCluster::start(2, "200MB", None)?;
    let trusting = ["--size", "200MB", "--slots", "0", "--trust-peers"];
    stage.test_cluster.cluster.add_node("trusting", &trusting)?;
    let content = Content::new(9, POISON_BYTES);
    stage.write_data_set("set", &content)?;
    let store = tempfile::tempdir()?;
    let cluster = &stage.test_cluster.cluster;
    let identity = cluster.identity();
    let liar = LyingNode::start(&identity, cluster.catalog_address(), store.path());
    let liar = stage.client.block_on(liar)?;
    stage.test_cluster.wait_for_servers(5)?;
    let mut nodes = vec![liar.address()];
    nodes.extend(stage.node_addresses());
    nodes.push(cluster.address("trusting").to_owned());
    let spec = CacheSpec::new("set", 2 * POISON_BYTES as u64);
    let volumes = stage.create_caches(&nodes, &spec)?;
    // It is the first that reads, so that nobody knows better.
    ensure!(count_wrong_reads(&stage, &volumes[0], &content)? == 0);
    let mut poisoned = 0;
    for volume in &volumes[1..3] {
        poisoned += count_wrong_reads(&stage, volume, &content)?;
    }
    let lies = liar.lies();
    let believed = count_wrong_reads(&stage, &volumes[3], &content)?;
    ensure!(lies > 0 && believed > 0, "the liar told {lies} lies");
    report.add_figure_with_target("poisoned_reads", poisoned as f64, 0.0..=0.0);
    report.add_figure("poisoned_reads_if_trusting", believed as f64);
    Ok(())
}

fn count_wrong_reads(stage: &CacheCluster, volume: &CacheVolume, content: &Content) -> Result<u64> {
    let reader = stage.new_reader()?;
    let mut wrong = 0;
    let count = |_: &str, offset, found: &[u8]| {
        wrong += u64::from(content.count_wrong_bytes(offset, found) > 0);
    };
    stage.client.block_on(reader.scan_files(volume, count))?;
    Ok(wrong)
}

/// The time of a cold read by two nodes that ask home what the blocks of the other are, over that
/// by two nodes that trust each other.
pub(super) fn measure_cost(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    report.print_section("cold reads with and without the question to home");
    let rounds = options.choose(9, 3);
    let mut stage = CacheCluster::start(2, "1GB", Some(LINK_RATE))?;
    let cluster = &mut stage.test_cluster.cluster;
    let names = ["t1", "t2"];
    for name in names {
        let words = ["--size", "1GB", "--slots", "0", "--trust-peers"];
        cluster.add_node(name, &words)?;
    }
    let trusting = names.map(|name| cluster.address(name).to_owned());
    stage.test_cluster.wait_for_servers(5)?;
    let asking = stage.node_addresses();
    let content = Content::new(1, COLD_BYTES);
    stage.write_data_set("cold", &content)?;
    let read = |nodes: &[String], name: &str| -> Result<f64> {
        let mut spec = CacheSpec::new("cold", 2 * COLD_BYTES as u64);
        name.clone_into(&mut spec.cooperative);
        let volumes = stage.create_caches(nodes, &spec)?;
        let (seconds, ()) = time_seconds(|| stage.check_scan(&volumes[0], &content))?;
        stage.delete_volumes(&volumes)?;
        for node in ["n1", "n2", "t1", "t2"] {
            let address = stage.test_cluster.cluster.address(node).to_owned();
            stage.client.block_on(drop_data(&stage, &address))?;
        }
        Ok(seconds)
    };
    let mut variants = [
        BenchmarkVariant::new("asking", || read(&asking, "asking")),
        BenchmarkVariant::new("trusting", || read(&trusting, "trusting")),
    ];
    let samples = run_interleaved(rounds, &mut variants)?;
    drop(variants);
    let cost = samples[0].ratio_to(&samples[1]);
    report.print_line(&format!(
        "  asking {} s, trusting {} s",
        samples[0], samples[1]
    ));
    report.add_figure_with_target("manifest_digest_cost", cost.median() - 1.0, -1.0..=0.03);
    let calls = stage.sum_counter(&asking, "cache_digest_calls")?;
    ensure!(calls > 0, "no node asked home");
    report.add_figure("digest_calls_per_read", calls as f64 / rounds as f64);
    Ok(())
}

/// Removes what the last volume left, so that the next read is cold.
async fn drop_data(stage: &CacheCluster, node: &str) -> Result<()> {
    let call = bafs_proto::cache::DropRetainedData { path: None };
    stage.client.client().call(node, call).await?;
    Ok(())
}
