//! A node of real processes whose disk is full beside one that is fine: the run goes on there, and
//! its results are right.

use std::fs::OpenOptions;

use anyhow::{Context, Result, ensure};
use bafs_tests::small_disk::{fill_disk, path_in_namespace, start_node_on_disk};
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip};

const PIPELINES: u32 = 4;

/// What the full disk has left: enough to make a volume, too little for its source.
const FREE_BYTES: u64 = 400_000;

/// Each first job passes on what its volume was filled with, the second adds a checksum.
const WORKFLOW: &str = "for i in 1..4\n\
    volume in$(i) scratch 2 MB files 10 from bafs://home/in/$(i)\n\
    volume work$(i) scratch 3 MB files 10\n\
    job pass$(i) {\nexecutable = /bin/sh\narguments = -c \"cat /in/$(i) > /scratch/all\"\n}\n\
    job sum$(i) {\nexecutable = /bin/sh\n\
    arguments = -c \"cksum < /scratch/all > /scratch/sum\"\n}\n\
    parent pass$(i) child sum$(i)\nmount in$(i) pass$(i) /in ro\n\
    mount work$(i) pass$(i) /scratch\nmount work$(i) sum$(i) /scratch\n\
    extract work$(i) sum bafs://home/out/$(i)\nend\n";

fn input_bytes(i: u32) -> Vec<u8> {
    (0..100_000u32)
        .flat_map(|at| (at.wrapping_mul(2_654_435_761) ^ i).to_le_bytes())
        .chain(std::iter::repeat_n(i.to_le_bytes()[0], 600_000))
        .collect()
}

fn checksum(data: &[u8]) -> Result<Vec<u8>> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), data)?;
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "cksum < $0"]).arg(file.path());
    Ok(command.output()?.stdout)
}

/// Whether a test of this name cannot run here, which is told.
fn is_skipped(name: &str) -> bool {
    let reason = match nix::unistd::geteuid().is_root() {
        true => mount_obstacle(),
        false => Some("it needs root to mount a small file system".to_owned()),
    };
    reason.inspect(|reason| report_skip(name, reason)).is_some()
}

#[test]
fn cluster_reruns_jobs_elsewhere_after_a_full_disk() -> Result<()> {
    if is_skipped("cluster_reruns_jobs_elsewhere_after_a_full_disk") {
        return Ok(());
    }
    let world = TestCluster::start(&["20MB"])?;
    for i in 1..=PIPELINES {
        world.write_home(&format!("in/{i}"), &input_bytes(i))?;
    }
    let directory = tempfile::tempdir()?;
    let store = directory.path().to_string_lossy().into_owned();
    let mut node = start_node_on_disk("-t tmpfs -o size=20m tmpfs", &world, &store)?;
    world.wait_for_servers(3)?;
    let filler = path_in_namespace(&node, &store).join("filler");
    fill_disk(&filler)?;
    let file = OpenOptions::new().write(true).open(&filler)?;
    file.set_len(file.metadata()?.len() - FREE_BYTES)?;

    let path = world
        .write_workflow(WORKFLOW)?
        .to_string_lossy()
        .into_owned();
    let output = world.bafs_command(&["run", &path]).output()?;
    ensure!(output.status.success(), printed_text(&output));
    for i in 1..=PIPELINES {
        let found = world.read_home(&format!("out/{i}"))?;
        ensure!(found == checksum(&input_bytes(i))?, "output {i} is wrong");
    }
    let left = world.run_json(&["volume", "list"])?;
    ensure!(left.as_array().is_some_and(Vec::is_empty), "{left}");
    // The larger node was tried first, and said what its disk has; nothing ran there.
    let told = world.bafs_command(&["replay", &path]).output()?;
    let told = String::from_utf8(told.stdout).context("a text")?;
    let met = told.lines().find(|line| line.contains("cannot be created"));
    let met = met.with_context(|| format!("the full disk was not met:\n{told}"))?;
    let full = format!("the disk of {store}/node has");
    ensure!(met.contains(&full) && met.contains("bytes"), "{met}");
    drop(node.stdin.take());
    node.wait()?;
    Ok(())
}

/// What each first job reads fills the disk of the only node that can run it: 58 MB of 64.
const SHARED_INPUT_MB: usize = 58;

/// The first job of each pipeline reads what all read, the second writes 20 MB and removes them.
const GREEDY_WORKFLOW: &str = "volume shared cache bafs://home/shared 60 MB\n\
    for i in 1..PIPELINES\n\
    volume w$(i) scratch 25 MB files 200\n\
    job a$(i) {\nexecutable = /bin/sh\narguments = -c \"cat /in/* | cksum > /w/sum\"\n}\n\
    job b$(i) {\nexecutable = /bin/sh\narguments = -c \"head -c 20000000 /dev/zero > /w/tmp \
    && cat /w/sum > /w/res && rm /w/tmp\"\n}\n\
    parent a$(i) child b$(i)\nmount shared a$(i) /in\nmount w$(i) a$(i) /w\n\
    mount w$(i) b$(i) /w\nextract w$(i) res bafs://home/out/$(i)\nend\n";

/// With three pipelines the second jobs run at the node whose disk is full.
#[test]
fn cluster_caches_yield_to_jobs_on_small_disks() -> Result<()> {
    check_cache_shrinks(3, "cluster_caches_yield_to_jobs_on_small_disks")
}

/// With two they run at the other one, and write there from afar.
#[test]
fn cluster_caches_yield_to_jobs_of_other_nodes() -> Result<()> {
    check_cache_shrinks(2, "cluster_caches_yield_to_jobs_of_other_nodes")
}

fn check_cache_shrinks(pipelines: u32, name: &str) -> Result<()> {
    if is_skipped(name) {
        return Ok(());
    }
    let world = TestCluster::start(&["1MB"])?;
    let shared: Vec<u8> = (0..SHARED_INPUT_MB * 250_000)
        .flat_map(|at| (at as u32).wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    world.write_home("shared/all", &shared)?;
    let directory = tempfile::tempdir()?;
    let store = directory.path().to_string_lossy().into_owned();
    let mut node = start_node_on_disk("-t tmpfs -o size=64m tmpfs", &world, &store)?;
    world.wait_for_servers(3)?;
    let workflow = GREEDY_WORKFLOW.replace("PIPELINES", &pipelines.to_string());
    let path = world
        .write_workflow(&workflow)?
        .to_string_lossy()
        .into_owned();
    let output = world.bafs_command(&["run", &path]).output()?;
    ensure!(output.status.success(), printed_text(&output));
    for i in 1..=pipelines {
        let found = world.read_home(&format!("out/{i}"))?;
        ensure!(found == checksum(&shared)?, "output {i} is wrong");
    }
    drop(node.stdin.take());
    node.wait()?;
    Ok(())
}
