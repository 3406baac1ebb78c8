//! `bafs sim`: runs a workload on machines that are not there. It starts nothing.

mod charts;
mod workload;

use std::fmt::Write;
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use bafs_sched::JobStartOrder;
use bafs_sim::planner::{
    CanonicalWorkload, Environment, Shortage, Strategy, StrategyCandidate, StrategyChoice,
    plan_workload,
};
use bafs_sim::simulator::{Policy, Scenario, Simulation, SimulationResult, StalledRunError};
use serde::Serialize;

use self::workload::{MeasuredRun, Workload};
use crate::args::SimArgs;
use crate::output::Printer;
use crate::units::format_bytes;

/// Simulates a workload, and prints how it went.
pub(crate) fn run_simulations(args: &SimArgs, output: Printer) -> Result<()> {
    let workload = Workload::from_args(args)?;
    let environment = workload.build_environment(args)?;
    let mut plan = plan_workload(workload.shape.clone(), &environment);
    let chosen = plan.choice.as_ref().map(|choice| choice.strategy);
    // A run of our own went by need.
    let is_planned = !args.all && args.strategy.is_none() && args.from_journal.is_none();
    if is_planned {
        workload.simulate_candidates(&mut plan, &environment)?;
    }
    let planned = plan.choice.as_ref().filter(|_| is_planned);
    let policies = select_policies(args, &plan.candidates, planned.map(|it| it.strategy))?;
    if let Some(directory) = &args.plot {
        charts::create_directory(directory)?;
    }
    let (mut rows, mut endless) = (Vec::new(), Vec::new());
    for policy in policies {
        match simulate_policy(args, &workload, &environment, &plan.candidates, policy)? {
            Ok(row) => rows.push(row),
            Err(stuck) => endless.push(StalledPolicy {
                policy: policy.to_string(),
                reason: stuck.to_string(),
            }),
        }
    }
    let shown = SimOutput {
        environment: &environment,
        seed: args.seed,
        model_choice: chosen,
        planned_choice: planned,
        measured_run: workload.measured_run.as_ref(),
        runs: &rows,
        stalled: &endless,
    };
    let mut text = String::new();
    if let Some(before) = &workload.measured_run {
        text = describe_measured_run(before)?;
    }
    text.push_str(&format_table(&rows, &endless, chosen)?);
    match (planned, &plan.refusal) {
        (Some(choice), _) => {
            write!(
                text,
                "\nplanner's choice: {}: {}",
                choice.strategy, choice.reason
            )?;
        }
        (None, Some(why)) if is_planned => write!(text, "\nno strategy chosen: {why}")?,
        _ => {}
    }
    output.print_result(&text, &shown)?;
    if let Some(directory) = &args.plot {
        let written = write_charts(args, &workload, &environment, &rows, directory)?;
        let directory = directory.display();
        output.print_remark(&format!("wrote to {directory}: {}", written.join(", ")))?;
    }
    // Of several policies one may well be impossible: that is what they are compared for.
    if rows.iter().all(|row| row.simulated_s.is_none()) {
        let why = describe_first_failure(&rows, &endless);
        bail!("no simulated run finished{why}");
    }
    Ok(())
}

/// Why the first run did not come to its end, behind what is said of all.
fn describe_first_failure(rows: &[SimulatedRun], endless: &[StalledPolicy]) -> String {
    let failure = |row: &SimulatedRun| Some((row.policy.clone(), row.run.failure()?));
    let failures = rows.iter().filter_map(failure);
    let endless = endless
        .iter()
        .map(|it| (it.policy.clone(), it.reason.clone()));
    let first = failures.chain(endless).next();
    first.map_or_else(String::new, |(policy, why)| {
        format!(": policy {policy}: {why}")
    })
}

fn write_charts(
    args: &SimArgs,
    workload: &Workload,
    environment: &Environment,
    rows: &[SimulatedRun],
    directory: &Path,
) -> Result<Vec<String>> {
    let mut written = charts::write_run_charts(directory, &workload.workflow, rows)?;
    if let Some(text) = &args.canonical {
        let canonical = CanonicalWorkload::parse(text).map_err(|e| anyhow!("--canonical: {e}"))?;
        written.extend(charts::write_canonical_charts(
            directory,
            &canonical,
            environment,
        )?);
    }
    Ok(written)
}

/// What machines get.
#[derive(Serialize)]
struct SimOutput<'s> {
    environment: &'s Environment,
    seed: u64,
    /// What the planner chooses by its model alone.
    model_choice: Option<Strategy>,
    /// What `bafs plan` chooses, where no policy was asked for.
    planned_choice: Option<&'s StrategyChoice>,
    /// How it really went.
    measured_run: Option<&'s MeasuredRun>,
    runs: &'s [SimulatedRun],
    /// Policies without an end.
    stalled: &'s [StalledPolicy],
}

/// A policy under which nothing goes on before all is done, and why.
#[derive(Serialize)]
struct StalledPolicy {
    policy: String,
    reason: String,
}

/// One policy.
#[derive(Serialize)]
struct SimulatedRun {
    policy: String,
    predicted_s: Option<f64>,
    /// How long it took, when every job was done.
    simulated_s: Option<f64>,
    #[serde(flatten)]
    run: SimulationResult,
}

/// How it really went.
fn describe_measured_run(before: &MeasuredRun) -> Result<String> {
    let mut text = String::new();
    if let Some(seconds) = before.duration_s {
        writeln!(text, "the real run took {seconds:.1} s")?;
    }
    for remark in &before.remarks {
        writeln!(text, "{remark}")?;
    }
    Ok(text)
}

fn select_policies(
    args: &SimArgs,
    candidates: &[StrategyCandidate],
    planned: Option<Strategy>,
) -> Result<Vec<Policy>> {
    if args.all {
        let possible = candidates.iter().filter(|c| c.allocation.is_possible());
        let strategies = possible.map(|c| Policy::from(c.allocation.strategy));
        let planned = strategies.filter(|policy| *policy != Policy::Need);
        return Ok(std::iter::once(Policy::Need).chain(planned).collect());
    }
    let Some(name) = &args.strategy else {
        return Ok(vec![planned.map_or(Policy::Need, Policy::from)]);
    };
    // `guided` is its name in versions before 0.2.
    let name = if name.eq_ignore_ascii_case("guided") {
        "adaptive"
    } else {
        name
    };
    let orders = [JobStartOrder::BreadthFirst, JobStartOrder::DepthFirst].map(Policy::Order);
    for policy in [Policy::Need, Policy::Adaptive].into_iter().chain(orders) {
        if name.eq_ignore_ascii_case(&policy.to_string()) {
            return Ok(vec![policy]);
        }
    }
    let found = candidates.iter().find(|candidate| {
        let strategy = candidate.allocation.strategy.to_string();
        strategy.eq_ignore_ascii_case(name)
    });
    let Some(candidate) = found else {
        bail!(
            "--strategy {name}: unknown strategy; choose All, AllPrivate, AllBatch, Slice, \
             Minimal, Remote, need, breadth-first, depth-first (no strategy, in that order) or \
             adaptive (automatic choice)"
        );
    };
    let why = match candidate.allocation.shortage {
        None => return Ok(vec![Policy::from(candidate.allocation.strategy)]),
        Some(Shortage::Total { missing_bytes }) => format!(
            "needs {} of storage, {} more than available",
            format_bytes(candidate.allocation.required_bytes),
            format_bytes(missing_bytes)
        ),
        Some(Shortage::Node { missing_bytes }) => format!(
            "keeps each scratch volume on one node, but the largest node lacks {} for it",
            format_bytes(missing_bytes)
        ),
        Some(Shortage::Cluster { missing_bytes }) => format!(
            "keeps batch data in one cluster, but the largest cluster lacks {} for them",
            format_bytes(missing_bytes)
        ),
        Some(Shortage::Files { batch_files }) => format!(
            "keeps batch data in one cluster, but no cluster has enough nodes with space for their \
             {batch_files} files"
        ),
        Some(Shortage::Placement { missing_volumes }) => format!(
            "keeps each scratch volume on one node, but {missing_volumes} of them fit on no node"
        ),
    };
    bail!("--strategy {name} {why}; `bafs plan` lists the feasible strategies")
}

fn simulate_policy(
    args: &SimArgs,
    workload: &Workload,
    environment: &Environment,
    candidates: &[StrategyCandidate],
    policy: Policy,
) -> Result<Result<SimulatedRun, StalledRunError>> {
    // Strategies are planned to the last byte; without one the scheduler leaves some.
    let is_planned = matches!(policy, Policy::Strategy(_));
    let slack_permille = workload.slack_permille().filter(|_| !is_planned);
    let load = workload.load.clone();
    let advice = match policy {
        Policy::Adaptive => workload.simulate_plan(environment)?,
        _ => None,
    };
    let usual = Scenario::new(environment.clone(), policy, load, args.seed);
    let scenario = Scenario {
        policies: args.policies.over(usual.policies.clone())?,
        slack_permille: slack_permille.unwrap_or(0),
        is_recorded: args.plot.is_some(),
        simulated_plan: advice,
        ..usual
    };
    let run = Simulation::new(workload.workflow.clone(), scenario).run();
    let run = match run {
        Ok(run) => run,
        Err(stuck) => return Ok(Err(stuck)),
    };
    let predicted = candidates
        .iter()
        .find(|c| Policy::from(c.allocation.strategy) == policy);
    Ok(Ok(SimulatedRun {
        policy: policy.to_string(),
        predicted_s: predicted.and_then(|candidate| candidate.predicted_s),
        simulated_s: run.is_complete().then(|| run.seconds()),
        run,
    }))
}

fn format_table(
    rows: &[SimulatedRun],
    endless: &[StalledPolicy],
    chosen: Option<Strategy>,
) -> Result<String> {
    let mut text = format!(
        "{:<11} {:>12} {:>12} {:>11} {:>11} {:>9} {:>9}\n",
        "strategy", "simulated", "predicted", "home link", "peers", "runs", "failures"
    );
    for row in rows {
        let shown = |seconds: Option<f64>| {
            seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.0} s"))
        };
        let (simulated, predicted) = (shown(row.simulated_s), shown(row.predicted_s));
        writeln!(
            text,
            "{:<11} {simulated:>12} {predicted:>12} {:>11} {:>11} {:>9} {:>9}",
            row.policy,
            format_bytes(row.run.home_bytes),
            format_bytes(row.run.peer_bytes),
            row.run.executions,
            row.run.failures,
        )?;
        for last in &row.run.strategy_changes {
            let strategy = last
                .strategy
                .map_or_else(|| "no strategy".to_owned(), |s| s.to_string());
            let seconds = last.changed_at.0 / 1_000;
            writeln!(text, "  from {seconds} s on {strategy}: {}", last.reason)?;
        }
        if let Some(why) = row.run.failure() {
            writeln!(text, "  FAILED: {why}")?;
        }
    }
    for StalledPolicy {
        policy,
        reason: why,
    } in endless
    {
        writeln!(text, "{policy:<11} {:>12}\n  FAILED: {why}", "-")?;
    }
    match chosen {
        Some(strategy) => write!(text, "\nthe model alone chooses {strategy}")?,
        None => write!(text, "\nthe model alone chooses no strategy")?,
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, CliCommand};

    fn parse_sim_args(more: &[&str]) -> SimArgs {
        let canonical = "width=350,depth=5,batch=45GB,private=0.5GB,run=50s";
        let usual = [
            "bafs",
            "sim",
            "--environment",
            "e.toml",
            "--canonical",
            canonical,
        ];
        let cli = Cli::parse_from(usual.iter().chain(more));
        match cli.command {
            CliCommand::Sim(args) => args,
            other => panic!("{other:?}"),
        }
    }

    fn choose_policies(more: &[&str]) -> Result<Vec<String>> {
        let text = include_str!("../../examples/environments/thesis.toml");
        let (args, environment) = (parse_sim_args(more), Environment::parse(text)?);
        let plan = plan_workload(Workload::from_args(&args)?.shape, &environment);
        let policies = select_policies(&args, &plan.candidates, Some(Strategy::Slice))?;
        Ok(policies.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn strategies_are_named_or_chosen_and_must_fit() {
        assert_eq!(choose_policies(&[]).unwrap(), ["Slice"]);
        assert_eq!(
            choose_policies(&["--strategy", "minimal"]).unwrap(),
            ["Minimal"]
        );
        let all = choose_policies(&["--all"]).unwrap();
        assert_eq!(all, ["need", "AllBatch", "Slice", "Minimal", "Remote"]);
        for (name, expected) in [("Sliced", "unknown strategy"), ("All", "needs 1.275 TB")] {
            let error = choose_policies(&["--strategy", name])
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn oversized_volume_is_not_a_total_shortage() {
        let text = include_str!("../../examples/environments/thesis.toml");
        let environment = Environment::parse(text).unwrap();
        let large = CanonicalWorkload::parse("width=2,depth=1,batch=1GB,private=6GB,run=5s");
        let candidates = plan_workload(large.unwrap().shape(), &environment).candidates;
        let args = parse_sim_args(&["--strategy", "Minimal"]);
        let error = select_policies(&args, &candidates, None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("largest node lacks 1.000 GB"), "{error}");
    }

    #[test]
    fn failed_simulation_has_no_time() {
        let text = include_str!("../../examples/environments/thesis.toml");
        let mut environment = Environment::parse(text).unwrap();
        environment.mtbf_s = Some(10);
        let mut args = parse_sim_args(&[]);
        args.canonical = Some("width=10,depth=2,batch=1GB,private=0.1GB,run=5000s".to_owned());
        let workload = Workload::from_args(&args).unwrap();
        let row = simulate_policy(&args, &workload, &environment, &[], Policy::Need)
            .unwrap()
            .unwrap();
        assert_eq!(row.simulated_s, None);
        let rows = [row];
        let table = format_table(&rows, &[], None).unwrap();
        assert!(
            table.contains("FAILED: simulation stopped after"),
            "{table}"
        );
        let said = describe_first_failure(&rows, &[]);
        assert!(
            said.starts_with(": policy need: simulation stopped after"),
            "{said}"
        );
    }

    /// Every node leaves before remote I/O is half done.
    #[test]
    fn failed_policy_does_not_hide_the_others() {
        let text = "home-rate = \"1 MB/s\"\nlocal-rate = \"100 MB/s\"\n\n\
                    [[nodes]]\ncount = 4\ncpus = 1\nstorage = \"50 GB\"\nuntil = \"10 h\"\n";
        let environment = Environment::parse(text).unwrap();
        let mut args = parse_sim_args(&["--all"]);
        args.canonical = Some("width=40,depth=1,batch=1GB,private=1MB,run=1000s".to_owned());
        let workload = Workload::from_args(&args).unwrap();
        let remote = Policy::Strategy(Strategy::Remote);
        let left = simulate_policy(&args, &workload, &environment, &[], remote).unwrap();
        let why = left.unwrap().run.failure().unwrap();
        assert!(why.contains("no node is live"), "{why}");
        // No run is known that comes to no end.
        let endless = [StalledPolicy {
            policy: remote.to_string(),
            reason: "no event is pending".to_owned(),
        }];
        let row = simulate_policy(&args, &workload, &environment, &[], Policy::Need)
            .unwrap()
            .unwrap();
        let table = format_table(&[row], &endless, None).unwrap();
        assert!(
            table.contains("need ") && table.contains("FAILED: no event"),
            "{table}"
        );
    }

    #[test]
    fn small_amounts_of_data_are_shown() {
        let text = include_str!("../../examples/environments/thesis.toml");
        let environment = Environment::parse(text).unwrap();
        let mut args = parse_sim_args(&[]);
        args.canonical = Some("width=1,depth=1,batch=0B,private=3KB,run=5s".to_owned());
        let workload = Workload::from_args(&args).unwrap();
        let row = simulate_policy(&args, &workload, &environment, &[], Policy::Need)
            .unwrap()
            .unwrap();
        let table = format_table(&[row], &[], None).unwrap();
        assert!(table.contains("6.000 KB"), "in and out: {table}");
    }

    #[test]
    fn plot_writes_a_picture_of_every_run() {
        let text = include_str!("../../examples/environments/thesis.toml");
        let environment = Environment::parse(text).unwrap();
        let canonical =
            CanonicalWorkload::parse("width=20,depth=2,batch=45GB,private=0.5GB,run=50s");
        let canonical = canonical.unwrap();
        let directory = tempfile::tempdir().unwrap();
        let mut args = parse_sim_args(&["--plot", &directory.path().to_string_lossy()]);
        args.canonical = Some("width=20,depth=2,batch=45GB,private=0.5GB,run=50s".to_owned());
        let workload = Workload::from_args(&args).unwrap();
        let plan = plan_workload(workload.shape.clone(), &environment);
        let policy = Policy::Strategy(Strategy::Slice);
        let candidates = &plan.candidates;
        let row = simulate_policy(&args, &workload, &environment, candidates, policy)
            .unwrap()
            .unwrap();
        let written =
            charts::write_run_charts(directory.path(), &workload.workflow, &[row]).unwrap();
        let names = [
            "workflow.dot",
            "processors.svg",
            "storage-slice.svg",
            "gantt-slice.svg",
        ];
        assert_eq!(written, names);
        let read = |name| std::fs::read_to_string(directory.path().join(name)).unwrap();
        // A bar for each of forty jobs beside the frame's own rectangles.
        assert!(read("gantt-slice.svg").matches("<rect").count() > 40);
        assert!(read("processors.svg").contains("Slice"));
        let map = charts::choice_map(&canonical, &environment);
        let chosen = map.cells.iter().flatten().flatten().count();
        assert!(
            chosen > 0 && map.categories.len() > 1,
            "{:?}",
            map.categories
        );
    }
}
