//! One program's many open files, and who goes on beside it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use bafs_tests::exec_job::start_cluster;
use bafs_tests::{TestCluster, find_tool, printed_text, processes_matching, report_skip};

/// Descriptors of the node.
const NODE_DESCRIPTORS_MAX: u64 = 2_000;

/// Opens what it can get, says how many that were and why no more, and has git work beside it.
const HOLD_SCRIPT: &str = "ulimit -n 4096; cd /vol; mkdir held; n=0; \
    while { exec {fd}<>held/$n; } 2>why; do n=$((n + 1)); done; cat why; echo \"held $n\"; \
    git init -q x && git clone -q x y 2>&1 && echo 'git in the same job'; echo end; read rest";

const GIT_SCRIPT: &str = "cd /vol; git init -q x && git clone -q x y 2>&1 && echo 'git in another \
    job'; ulimit -n 4096; n=0; while [ $n -lt 60 ] && exec {fd}<>f$n; do n=$((n + 1)); done; \
    echo \"opened $n\"";

#[test]
fn mount_leaves_descriptors_to_other_jobs() -> Result<()> {
    let name = "mount_leaves_descriptors_to_other_jobs";
    let Some(world) = start_cluster(name, "300MB")? else {
        return Ok(());
    };
    if find_tool("prlimit").is_none() || find_tool("git").is_none() {
        report_skip(name, "it needs prlimit and git");
        return Ok(());
    }
    for volume in ["v", "w"] {
        world.run_json(&["volume", "create", volume, "--node", "n1", "--size", "50MB"])?;
    }
    std::fs::remove_file(world.cluster.directory().join("n1").join("handoff.sock"))?;
    limit_node_descriptors(&world)?;
    let mut holding = job_command(&world, "v:/vol", HOLD_SCRIPT).spawn()?;
    let lines = BufReader::new(holding.stdout.take().context("its output")?).lines();
    let lines = lines.map_while(std::result::Result::ok);
    let told: Vec<String> = lines.take_while(|line| line != "end").collect();
    let other = job_command(&world, "w:/vol", GIT_SCRIPT).output()?;
    drop(holding.stdin.take());
    let ended = holding.wait_with_output()?;
    let all = format!("{}\n{}", told.join("\n"), printed_text(&ended));
    let held = told.iter().find_map(|line| line.strip_prefix("held "));
    let held: u64 = held.with_context(|| all.clone())?.parse()?;
    eprintln!("{held} of {NODE_DESCRIPTORS_MAX}");
    ensure!(held > NODE_DESCRIPTORS_MAX / 4, "{held} are few");
    ensure!(all.contains("Too many open files"), all);
    ensure!(!all.contains("in system"), all);
    ensure!(all.contains("git in the same job"), all);
    ensure!(
        printed_text(&other).contains("git in another job"),
        printed_text(&other)
    );
    ensure!(
        printed_text(&other).contains("opened 60"),
        printed_text(&other)
    );
    Ok(())
}

fn job_command(world: &TestCluster, mount: &str, script: &str) -> Command {
    let args = ["exec", "--mount", mount, "--", "/bin/bash", "-c", script];
    let mut command = world.bafs_command(&args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command.stderr(Stdio::piped());
    command
}

fn limit_node_descriptors(world: &TestCluster) -> Result<()> {
    let directory = world.cluster.directory().to_string_lossy().into_owned();
    let node = processes_matching(&directory)
        .into_iter()
        .find(|line| line.contains(" node "));
    let node = node.context("the node runs")?;
    let pid = node.split(' ').next().context("a number")?;
    let limit = format!("--nofile={NODE_DESCRIPTORS_MAX}");
    let status = Command::new("prlimit")
        .args(["--pid", pid, &limit])
        .status()?;
    ensure!(status.success());
    Ok(())
}
