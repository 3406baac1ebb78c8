//! Two users' workflows at once on one cluster of real processes: neither starves, both end, and
//! none takes space that the other was promised.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_sched::Event;
use bafs_sched::io::journal;
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip};

/// Pipelines of two jobs whose second volume is larger than their first, so that whoever begins as
/// many as fit can end none. Each job says on the host who it is when it starts and when it ends.
fn write_pipelines(
    world: &TestCluster,
    user: &str,
    count: u32,
    sizes: (&str, &str),
) -> Result<PathBuf> {
    let log = world.home.path().join("log");
    let text = format!(
        "for i in 1..{count}\n\
         volume x$(i) scratch {} files 10\n\
         volume y$(i) scratch {} files 10\n\
         job a$(i) {{\n\
           executable = /bin/sh\n\
           arguments = -c \"echo {user} + >> {log}; sleep 0.5; echo $(i) > /x/out; \
           echo {user} - >> {log}\"\n\
         }}\n\
         job b$(i) {{\n\
           executable = /bin/sh\n\
           arguments = -c \"echo {user} + >> {log}; sleep 0.5; cp /x/out /y/out; \
           echo {user} - >> {log}\"\n\
         }}\n\
         parent a$(i) child b$(i)\n\
         mount x$(i) a$(i) /x\n\
         mount x$(i) b$(i) /x ro\n\
         mount y$(i) b$(i) /y\n\
         extract y$(i) out bafs://home/{user}/$(i)\n\
         end\n",
        sizes.0,
        sizes.1,
        log = log.display(),
    );
    let path = world.home.path().join(format!("{user}.bafs"));
    std::fs::write(&path, text)?;
    Ok(path)
}

fn start_run(world: &TestCluster, user: &str, workflow: &Path) -> Result<Child> {
    let workflow = workflow.to_string_lossy();
    let mut command = world.bafs_command(&["run", &workflow, "--user", user, "--json"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().context("bafs run starts")
}

fn read_log(world: &TestCluster) -> Vec<String> {
    let log = world.read_home("log").unwrap_or_default();
    let log = String::from_utf8_lossy(&log).into_owned();
    log.lines().map(str::to_owned).collect()
}

fn wait_for_lines(world: &TestCluster, count: usize) -> Result<()> {
    for _ in 0..600 {
        if read_log(world).len() >= count {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    anyhow::bail!("the log has {} lines", read_log(world).len())
}

/// The run ended complete, nothing of it ran twice, and no volume was refused.
fn check_run(world: &TestCluster, user: &str, run: Child, count: u32) -> Result<()> {
    let output = run.wait_with_output()?;
    ensure!(output.status.success(), "{user}: {}", printed_text(&output));
    for i in 1..=count {
        let found = world.read_home(&format!("{user}/{i}"))?;
        ensure!(found == format!("{i}\n").into_bytes(), "{user}/{i}");
    }
    let path = world.home.path().join(format!("{user}.bafs.journal"));
    let mut started = 0;
    for step in journal::read_history(&path)?.steps {
        match step.event {
            Event::JobStarted { .. } => started += 1,
            Event::VolumeCreateFailed { error, .. } => {
                anyhow::bail!("{user}: promised space was taken: {error}");
            }
            _ => {}
        }
    }
    ensure!(started == 2 * count, "{user}: {started} executions");
    Ok(())
}

/// Most jobs that ran at once.
fn count_concurrent_jobs(log: &[String]) -> u32 {
    let (mut now, mut most) = (0u32, 0);
    for line in log {
        now = match line.ends_with('+') {
            true => now + 1,
            false => now.saturating_sub(1),
        };
        most = most.max(now);
    }
    most
}

fn find_line(log: &[String], line: &str, is_last: bool) -> Option<usize> {
    let mut lines = log.iter();
    match is_last {
        true => lines.rposition(|found| found == line),
        false => lines.position(|found| found == line),
    }
}

/// A long run of one user is under way when another one's begins.
fn check_fair_share(
    name: &str,
    nodes: &[&str],
    slots: u32,
    sizes: (&str, &str),
    short: u32,
) -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    let world = TestCluster::start_with_spec(nodes, |spec| spec.slots = slots)?;
    world.wait_for_servers(nodes.len() + 1)?;
    // Longer than some turns.
    let long = 30;
    let alice = write_pipelines(&world, "alice", long, sizes)?;
    let bob = write_pipelines(&world, "bob", short, sizes)?;
    let alice = start_run(&world, "alice", &alice)?;
    wait_for_lines(&world, 4)?;
    let bob = start_run(&world, "bob", &bob)?;
    check_run(&world, "bob", bob, short)?;
    check_run(&world, "alice", alice, long)?;
    let log = read_log(&world);
    let bobs_end = find_line(&log, "bob -", true);
    let alices_end = find_line(&log, "alice -", true);
    ensure!(bobs_end < alices_end, "bob waited for alice: {log:?}");
    let in_between = &log[find_line(&log, "bob +", false).unwrap_or(0)..bobs_end.unwrap_or(0)];
    ensure!(
        in_between.iter().any(|line| line == "alice +"),
        "alice waited for bob: {log:?}"
    );
    // A job says that it ends before its slot is free.
    let most = count_concurrent_jobs(&log);
    let slots = slots * u32::try_from(nodes.len())?;
    ensure!(most <= slots, "{most} jobs at once on {slots} slots");
    let volumes = world.run_json(&["volume", "list"])?;
    ensure!(
        volumes.as_array().is_some_and(Vec::is_empty),
        "volumes are left: {volumes}"
    );
    Ok(())
}

#[test]
fn cluster_users_get_equal_and_guaranteed_shares() -> Result<()> {
    let name = "cluster_users_get_equal_and_guaranteed_shares";
    check_fair_share(name, &["20MB", "20MB"], 2, ("3 MB", "6 MB"), 3)
}

/// One slot, and space for one pipeline at a time; both have work for more than one turn.
#[test]
fn cluster_users_take_turns_on_an_indivisible_node() -> Result<()> {
    let name = "cluster_users_take_turns_on_an_indivisible_node";
    check_fair_share(name, &["20MB"], 1, ("5 MB", "10 MB"), 12)
}
