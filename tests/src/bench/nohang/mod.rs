//! `bench nohang`: programs on volumes while servers, links, disks and agents fail. Each program's
//! observations, the time until it continued or was gone, and the leftovers.

mod fault_case;
pub(crate) mod fault_scenario;
mod probe_program;

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use self::fault_case::{CaseResult, FaultCase, ProgramLocation, RunningCase, VolumeLocality};
pub use self::fault_scenario::FaultScenario;
use self::probe_program::ProbeVolume;
pub use self::probe_program::{CHECK_COMMAND, PROBE_COMMAND};
use super::measure::{Stopwatch, format_number};
use super::{BenchmarkReport, Options};
use crate::TestCluster;

/// Deadline of remote operations, in seconds: longer than the shortest silence on which an agent's
/// watchers act, and than the silence after which a connection is closed (five seconds).
const OPERATION_TIMEOUT_S: u64 = 6;

/// Beyond the deadline a job is ended within two seconds, and all is gone.
const END_MARGIN: Duration = Duration::from_secs(2);

/// Time beyond that until a program that is still stuck counts as hung.
const HANG_MARGIN: Duration = Duration::from_secs(5);

/// Calls that a program makes after a fault that has passed.
const PROGRESS_CALLS: u64 = 50;

const POLL_INTERVAL: Duration = Duration::from_millis(20);

const CASES: [(ProbeVolume, ProgramLocation); 4] = [
    (ProbeVolume::Scratch, ProgramLocation::Job),
    (ProbeVolume::Scratch, ProgramLocation::Host),
    (ProbeVolume::Cache, ProgramLocation::Job),
    (ProbeVolume::Cache, ProgramLocation::Host),
];

/// The results of one fault's cases.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultResult {
    /// Programs that met the fault.
    pub case_count: usize,
    /// The cases that neither continued nor ended.
    pub hung_count: usize,
    /// Processes, mounts and files that were left.
    pub leftovers: Vec<String>,
    /// Bytes that were read wrong, or kept and lost.
    pub wrong_bytes: u64,
    /// The longest time until one continued or was gone.
    pub longest: Duration,
    /// A line for each case: its name, its observation, seconds, leftovers.
    pub lines: Vec<[String; 4]>,
}

/// Has programs meet one fault, in a name space of their own. `tools` is the program that
/// understands [`PROBE_COMMAND`] and [`CHECK_COMMAND`].
///
/// # Errors
/// The errors that kept the programs from running; not the effects of faults.
pub fn run_scenario(fault: FaultScenario, tools: &str) -> Result<FaultResult> {
    std::thread::scope(|scope| {
        // A thread: its own name spaces end with it.
        let apart = scope.spawn(|| {
            fault_scenario::enter_private_namespaces()
                .and_then(|()| run_scenario_here(fault, tools))
        });
        apart
            .join()
            .unwrap_or_else(|_| anyhow::bail!("it panicked"))
    })
    .with_context(|| fault.name())
}

/// The longest time until a program continues, or everything of it is gone.
pub fn time_to_resolve_max() -> Duration {
    Duration::from_secs(OPERATION_TIMEOUT_S) + END_MARGIN
}

fn run_scenario_here(fault: FaultScenario, tools: &str) -> Result<FaultResult> {
    let mut world = TestCluster::start(&["3GB"])?;
    world.wait_for_servers(2)?;
    fault.set_up(&mut world)?;
    world.wait_for_servers(2)?;
    let mut running = Vec::new();
    for way in [VolumeLocality::Local, VolumeLocality::Remote] {
        if way == VolumeLocality::Remote {
            fault_scenario::disable_fd_passing(&world)?;
        }
        for (work, place) in CASES {
            let case = FaultCase {
                work,
                location: place,
                locality: way,
            };
            running.push(RunningCase::start(
                &world,
                tools,
                case,
                OPERATION_TIMEOUT_S,
            )?);
        }
    }
    let watch = Stopwatch::start();
    fault.inject(&mut world, &running)?;
    running.iter_mut().for_each(RunningCase::mark_fault);
    let hung = watch_cases(fault, &world, &mut running, &watch)?;
    fault.revert(&mut world)?;
    world.wait_for_servers(2)?;
    let mut verdict = FaultResult::default();
    for (running, hung) in running.into_iter().zip(hung) {
        verdict.add_case(running.finish(&world, tools, hung)?);
    }
    fault.tear_down(&world)?;
    Ok(verdict)
}

/// Watches until each program has ended or continues; returns the programs that did neither.
fn watch_cases(
    fault: FaultScenario,
    world: &TestCluster,
    running: &mut [RunningCase],
    watch: &Stopwatch,
) -> Result<Vec<bool>> {
    loop {
        fault.sustain(world)?;
        let elapsed = watch.elapsed();
        let (mut all_ended, mut all_well, mut stuck) = (true, true, Vec::new());
        for it in running.iter_mut() {
            let ended = it.poll(watch)?;
            all_ended &= ended;
            all_well &= ended || it.has_progressed(PROGRESS_CALLS);
            stuck.push(!ended && (it.is_stuck(POLL_INTERVAL * 10) || !it.has_progressed(1)));
        }
        let passed = fault.is_transient() && all_well;
        let waited = elapsed > time_to_resolve_max() && !stuck.contains(&true);
        if all_ended || passed || waited {
            return Ok(vec![false; running.len()]);
        }
        if elapsed > time_to_resolve_max() + HANG_MARGIN {
            return Ok(stuck);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

impl FaultResult {
    fn add_case(&mut self, found: CaseResult) {
        let took = Duration::from_millis(found.duration_ms);
        self.case_count += 1;
        self.hung_count += usize::from(found.has_hung);
        self.wrong_bytes += found.wrong_bytes;
        self.longest = self.longest.max(took);
        let seconds = format_number(took.as_secs_f64());
        let left = found.leftovers.len().to_string();
        let saw = if found.has_hung {
            "HUNG".to_owned()
        } else {
            found.observation
        };
        self.lines.push([found.case, saw, seconds, left]);
        self.leftovers.extend(found.leftovers);
    }
}

/// Runs the wanted faults.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let names: Vec<_> = FaultScenario::ALL
        .iter()
        .map(|fault| fault.name())
        .collect();
    let known = |name: &String| names.contains(&name.as_str());
    ensure!(
        options.only.iter().all(known),
        "the faults are {}",
        names.join(", ")
    );
    ensure!(
        nix::unistd::geteuid().is_root(),
        "it needs root: for name spaces and for what it does to a network and a disk in them"
    );
    report.print_section(&format!(
        "deadline of operations {OPERATION_TIMEOUT_S} s; a job is ended within {} s after that",
        END_MARGIN.as_secs()
    ));
    let tools = std::env::current_exe()?.to_string_lossy().into_owned();
    let mut all = FaultResult::default();
    for fault in FaultScenario::ALL
        .into_iter()
        .filter(|it| options.is_part_selected(it.name()))
    {
        let verdict = run_scenario(fault, &tools)?;
        let head = [fault.name(), "what the program saw", "seconds", "left"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        rows.extend(verdict.lines.iter().map(|line| line.to_vec()));
        report.print_table(&rows);
        for left in &verdict.leftovers {
            report.print_line(&format!("  LEFT: {left}"));
        }
        all.case_count += verdict.case_count;
        all.hung_count += verdict.hung_count;
        all.wrong_bytes += verdict.wrong_bytes;
        all.longest = all.longest.max(verdict.longest);
        all.leftovers.extend(verdict.leftovers);
    }
    report.add_figure("cases", all.case_count as f64);
    report.add_figure("hung", all.hung_count as f64);
    report.add_figure("leftovers", all.leftovers.len() as f64);
    report.add_figure("wrong_data", all.wrong_bytes as f64);
    report.add_figure("worst_seconds", all.longest.as_secs_f64());
    let is_well = all.hung_count == 0 && all.leftovers.is_empty() && all.wrong_bytes == 0;
    ensure!(
        is_well && all.longest <= time_to_resolve_max(),
        "the promise is broken: see above"
    );
    Ok(())
}

/// The hidden commands [`PROBE_COMMAND`] and [`CHECK_COMMAND`].
pub(super) fn run_tool(name: &str, arguments: &[String]) -> Option<Result<()>> {
    match name {
        PROBE_COMMAND => Some(probe_program::run_probe(arguments)),
        CHECK_COMMAND => Some(probe_program::run_check(arguments)),
        _ => None,
    }
}
