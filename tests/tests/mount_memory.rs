//! An agent with little memory: it moves much more data than it may keep.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use bafs_tests::many_volumes::{AccessMethod, run_job_with_volumes};
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip};

/// What the agent may use for data that pass through it, in MiB.
const MEMORY_MIB: u64 = 64;

/// What it may take beside that, in MiB: code, threads, connections, what an allocator keeps.
const OVERHEAD_MIB: u64 = 64;

/// Writes so many MiB over the network by `writers` processes at once, and reads them; the agent's
/// memory stays within its bound.
fn check_memory_while_writing(name: &str, mib_each: u64, writers: u64) -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    let total = mib_each * writers;
    let size = format!("{} MiB", total + 64);
    let world = TestCluster::start(&[&format!("{} MiB", total + 128)])?;
    world.wait_for_servers(2)?;
    world.run_json(&[
        "volume", "create", "v", "--node", "n1", "--size", &size, "--limit", "exact",
    ])?;
    // Nobody is let in at the node's door: data go over the network, through the agent.
    let handoff = world.cluster.directory().join("n1").join("handoff.sock");
    std::fs::remove_file(&handoff).context("the node has a door")?;
    let script = format!(
        "cd /vol; for n in $(seq {writers}); do \
           (yes $n | dd of=$n bs=1M count={mib_each} iflag=fullblock 2>/dev/null) & done; wait; \
         for n in $(seq {writers}); do \
           (yes $n | head -c {mib_each}M | cmp - $n && echo same) & done; wait; \
         echo end; read rest"
    );
    let memory = format!("{MEMORY_MIB}MiB");
    let args = [
        "exec",
        "--memory",
        &memory,
        "--explain",
        "--mount",
        "v:/vol",
        "--",
    ];
    let mut command = world.bafs_command(&[&args[..], &["/bin/bash", "-c", &script]].concat());
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut agent = command.stderr(Stdio::piped()).spawn()?;
    let stdout = BufReader::new(agent.stdout.take().context("its output")?);
    let lines = stdout.lines().map_while(std::result::Result::ok);
    let told: Vec<String> = lines.take_while(|line| line != "end").collect();
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.id()))?;
    drop(agent.stdin.take());
    let output = agent.wait_with_output()?;
    ensure!(
        told.len() as u64 == writers,
        "{told:?}: {}",
        printed_text(&output)
    );
    ensure!(
        printed_text(&output).contains("calls:"),
        printed_text(&output)
    );
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak
        .context("the kernel tells")?
        .trim()
        .trim_end_matches(" kB");
    let peak_mib = peak.parse::<u64>()? / 1024;
    eprintln!("{total} MiB through {MEMORY_MIB} MiB: {peak_mib} MiB at most");
    ensure!(peak_mib <= MEMORY_MIB + OVERHEAD_MIB, "{peak_mib} MiB");
    Ok(())
}

#[test]
fn mount_moves_much_data_with_little_memory() -> Result<()> {
    check_memory_while_writing("mount_moves_much_data_with_little_memory", 128, 8)
}

#[test]
#[ignore = "moves 10 GiB twice"]
fn mount_moves_ten_gib_with_little_memory() -> Result<()> {
    check_memory_while_writing("mount_moves_ten_gib_with_little_memory", 1280, 8)
}

/// Nothing is under way when the volumes are small: what their agent takes is what it takes beside.
fn check_idle_memory(name: &str, count: usize) -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    for reach in [AccessMethod::Inline, AccessMethod::Calls] {
        let ran = run_job_with_volumes(count, reach)?;
        eprintln!("{count} volumes, {reach:?}: {ran:?}");
        ensure!(ran.agent_mib <= OVERHEAD_MIB, "{reach:?}: {ran:?}");
    }
    Ok(())
}

#[test]
fn mount_of_a_hundred_volumes_takes_little_memory() -> Result<()> {
    check_idle_memory("mount_of_a_hundred_volumes_takes_little_memory", 100)
}

#[test]
#[ignore = "mounts a thousand volumes twice"]
fn mount_of_a_thousand_volumes_takes_little_memory() -> Result<()> {
    check_idle_memory("mount_of_a_thousand_volumes_takes_little_memory", 1_000)
}

#[test]
fn mount_protects_the_agent_and_not_its_job() -> Result<()> {
    let name = "mount_protects_the_agent_and_not_its_job";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    let asking = "echo -500 > /proc/self/oom_score_adj";
    let mut may = Command::new("/bin/sh");
    may.args(["-c", asking]).stderr(Stdio::null());
    if !may.status()?.success() {
        report_skip(name, "it needs CAP_SYS_RESOURCE");
        return Ok(());
    }
    let world = TestCluster::start(&["20MB"])?;
    let script = "cat /proc/$$/oom_score_adj; read rest";
    let mut command = world.bafs_command(&["exec", "--", "/bin/sh", "-c", script]);
    let mut agent = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut job = String::new();
    BufReader::new(agent.stdout.take().context("its output")?).read_line(&mut job)?;
    let own = std::fs::read_to_string("/proc/self/oom_score_adj")?;
    let protected = std::fs::read_to_string(format!("/proc/{}/oom_score_adj", agent.id()))?;
    drop(agent.stdin.take());
    agent.wait()?;
    ensure!(job == own, "the job has {job}, this test {own}");
    ensure!(protected.trim() == "-500", "the agent has {protected}");
    Ok(())
}
