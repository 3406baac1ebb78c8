//! `bench nohang`: programs on volumes while servers, links, disks and agents fail. What each saw,
//! how long until it went on or everything of it was gone, and what was left.

mod case;
pub(crate) mod fault;
mod probe;

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use self::case::{Case, Found, Place, Running, Way};
pub use self::fault::Fault;
use self::probe::Work;
pub use self::probe::{CHECK, PROBE};
use super::measure::{Stopwatch, format_number};
use super::{Options, BenchmarkReport};
use crate::TestCluster;

/// Deadline of remote operations, in seconds: longer than the shortest silence of an agent that
/// its watchers act on, and than a connection needs to be given up (five seconds of silence).
const OPERATION_TIMEOUT_S: u64 = 6;

/// Beyond the deadline a job is ended within two seconds, and all is gone.
const END_MARGIN: Duration = Duration::from_secs(2);

/// Time beyond that until a program that is still stuck counts as hung.
const HANG_MARGIN: Duration = Duration::from_secs(5);

/// Calls that a program makes after a fault that has passed.
const PROGRESS_CALLS: u64 = 50;

const POLL_INTERVAL: Duration = Duration::from_millis(20);

const CASES: [(Work, Place); 4] = [
    (Work::Scratch, Place::Job),
    (Work::Scratch, Place::Host),
    (Work::Cache, Place::Job),
    (Work::Cache, Place::Host),
];

/// What the cases of one fault came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultResult {
    /// Programs that met the fault.
    pub case_count: usize,
    /// Of these, those that neither went on nor ended.
    pub hung: usize,
    /// Processes, mounts and files that were left.
    pub leftovers: Vec<String>,
    /// Bytes that were read wrong, or kept and lost.
    pub wrong_bytes: u64,
    /// The longest time until one went on or was gone.
    pub worst: Duration,
    /// A line for each case: its name, what it saw, seconds, leftovers.
    pub lines: Vec<[String; 4]>,
}

/// Has programs meet one fault, in a name space of their own. `tools` is the program that
/// understands [`PROBE`] and [`CHECK`].
///
/// # Errors
/// What kept the programs from running; not what they met.
pub fn meet(fault: Fault, tools: &str) -> Result<FaultResult> {
    std::thread::scope(|scope| {
        // A thread: what is its own ends with it.
        let apart = scope.spawn(|| fault::live_apart().and_then(|()| meet_here(fault, tools)));
        apart
            .join()
            .unwrap_or_else(|_| anyhow::bail!("it panicked"))
    })
    .with_context(|| fault.name())
}

/// The longest time until a program goes on, or everything of it is gone.
pub fn longest() -> Duration {
    Duration::from_secs(OPERATION_TIMEOUT_S) + END_MARGIN
}

fn meet_here(fault: Fault, tools: &str) -> Result<FaultResult> {
    let mut world = TestCluster::start(&["3GB"])?;
    world.wait_for_servers(2)?;
    fault.prepare(&mut world)?;
    world.wait_for_servers(2)?;
    let mut running = Vec::new();
    for way in [Way::Near, Way::Far] {
        if way == Way::Far {
            fault::close_door(&world)?;
        }
        for (work, place) in CASES {
            let case = Case { work, place, way };
            running.push(Running::start(&world, tools, case, OPERATION_TIMEOUT_S)?);
        }
    }
    let watch = Stopwatch::start();
    fault.happen(&mut world, &running)?;
    running.iter_mut().for_each(Running::mark);
    let hung = watch_all(fault, &world, &mut running, &watch)?;
    fault.heal(&mut world)?;
    world.wait_for_servers(2)?;
    let mut verdict = FaultResult::default();
    for (running, hung) in running.into_iter().zip(hung) {
        verdict.add(running.end(&world, tools, hung)?);
    }
    fault.clear(&world)?;
    Ok(verdict)
}

/// Watches until each program has ended, or is known to go on; tells which did neither.
fn watch_all(
    fault: Fault,
    world: &TestCluster,
    running: &mut [Running],
    watch: &Stopwatch,
) -> Result<Vec<bool>> {
    loop {
        fault.stay(world)?;
        let elapsed = watch.elapsed();
        let (mut all_ended, mut all_well, mut stuck) = (true, true, Vec::new());
        for it in running.iter_mut() {
            let ended = it.look(watch)?;
            all_ended &= ended;
            all_well &= ended || it.goes_on(PROGRESS_CALLS);
            stuck.push(!ended && (it.is_stuck(POLL_INTERVAL * 10) || !it.goes_on(1)));
        }
        let passed = fault.passes() && all_well;
        let waited = elapsed > longest() && !stuck.contains(&true);
        if all_ended || passed || waited {
            return Ok(vec![false; running.len()]);
        }
        if elapsed > longest() + HANG_MARGIN {
            return Ok(stuck);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

impl FaultResult {
    fn add(&mut self, found: Found) {
        let took = Duration::from_millis(found.took_ms);
        self.case_count += 1;
        self.hung += usize::from(found.hung);
        self.wrong_bytes += found.wrong_bytes;
        self.worst = self.worst.max(took);
        let seconds = format_number(took.as_secs_f64());
        let left = found.leftovers.len().to_string();
        let saw = if found.hung {
            "HUNG".to_owned()
        } else {
            found.saw
        };
        self.lines.push([found.case, saw, seconds, left]);
        self.leftovers.extend(found.leftovers);
    }
}

/// Runs the wanted faults.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let names: Vec<_> = Fault::ALL.iter().map(|fault| fault.name()).collect();
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
    for fault in Fault::ALL.into_iter().filter(|it| options.is_part_selected(it.name())) {
        let verdict = meet(fault, &tools)?;
        let head = [fault.name(), "what the program saw", "seconds", "left"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        rows.extend(verdict.lines.iter().map(|line| line.to_vec()));
        report.print_table(&rows);
        for left in &verdict.leftovers {
            report.print_line(&format!("  LEFT: {left}"));
        }
        all.case_count += verdict.case_count;
        all.hung += verdict.hung;
        all.wrong_bytes += verdict.wrong_bytes;
        all.worst = all.worst.max(verdict.worst);
        all.leftovers.extend(verdict.leftovers);
    }
    report.add_figure("cases", all.case_count as f64);
    report.add_figure("hung", all.hung as f64);
    report.add_figure("leftovers", all.leftovers.len() as f64);
    report.add_figure("wrong_data", all.wrong_bytes as f64);
    report.add_figure("worst_seconds", all.worst.as_secs_f64());
    let is_well = all.hung == 0 && all.leftovers.is_empty() && all.wrong_bytes == 0;
    ensure!(
        is_well && all.worst <= longest(),
        "the promise is broken: see above"
    );
    Ok(())
}

/// What [`PROBE`] and [`CHECK`] stand for.
pub(super) fn tool(name: &str, arguments: &[String]) -> Option<Result<()>> {
    match name {
        PROBE => Some(probe::probe(arguments)),
        CHECK => Some(probe::check(arguments)),
        _ => None,
    }
}
