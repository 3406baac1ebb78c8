//! A job with very many volumes, and the resources of its agent. Asserts nothing.

use std::fs;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::{TestCluster, printed_text, processes_matching};

/// How the volumes are reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessMethod {
    /// The agent has the directories.
    Inline,
    /// Each operation is a call to the node.
    Calls,
}

/// A job with many volumes that ended well.
#[derive(Debug, Clone, Copy)]
pub struct ManyVolumesResult {
    /// The most anonymous memory that its agent had, in MiB.
    pub agent_mib: u64,
    /// How long the workflow took.
    pub wall_time: Duration,
}

/// Runs a job that writes a file to each of so many volumes and reads all of them.
///
/// # Errors
/// A cluster that does not start; a job that fails, or reads something else.
#[expect(clippy::disallowed_methods, reason = "measures")]
pub fn run_job_with_volumes(count: usize, reach: AccessMethod) -> Result<ManyVolumesResult> {
    let world = TestCluster::start(&["2GB"])?;
    world.wait_for_servers(2)?;
    if reach == AccessMethod::Calls {
        let handoff = world.cluster.directory().join("n1").join("handoff.sock");
        fs::remove_file(&handoff).context("the node has a door")?;
    }
    let workflow = world.write_workflow(&format!(
        "for i in 1..{count}\n  volume v$(i) scratch 400 KB files 4\n  mount v$(i) a /in/$(i)\n\
         end\nvolume r scratch 1 MB\n\
         job a {{\n  executable = sh\n  arguments = -c 'for i in /in/*; do \
         head -c 300000 /dev/zero > $i/x; echo x >> $i/x; done; \
         cat /in/*/x | tr -d \"\\0\" | wc -l > /r/x; sleep 0.3'\n}}\n\
         mount r a /r\nextract r x bafs://home/x\n"
    ))?;
    let start = Instant::now();
    let path = workflow.to_string_lossy().into_owned();
    let mut command = world.bafs_command(&["run", &path]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = command.spawn()?;
    let directory = world.cluster.directory().to_string_lossy().into_owned();
    let mut most_kib = 0;
    while running.try_wait()?.is_none() {
        for process in processes_matching(&directory) {
            if process.contains(" agent ") {
                most_kib = most_kib.max(anonymous_kib(&process).unwrap_or(0));
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    let wall = start.elapsed();
    let output = running.wait_with_output()?;
    ensure!(output.status.success(), "{}", printed_text(&output));
    let lines = String::from_utf8(world.read_home("x")?)?;
    ensure!(lines.trim() == count.to_string(), "{lines} lines");
    ensure!(most_kib > 0, "no agent was seen");
    Ok(ManyVolumesResult {
        agent_mib: most_kib.div_ceil(1024),
        wall_time: wall,
    })
}

/// Anonymous memory of a process, of which `pid command line` is known.
fn anonymous_kib(process: &str) -> Option<u64> {
    let pid = process.split(' ').next()?;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}
