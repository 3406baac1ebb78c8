//! What `bafs sim` simulates and on which machines, from its arguments. It simulates nothing.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use bafs_sched::io::journal;
use bafs_sim::past_runs::{self, PastRun, Site};
use bafs_sim::planner::{
    CanonicalWorkload, Environment, Plan, RESTART_S_DEFAULT, Shape, SimulatedPlan,
};
use bafs_sim::simulator::{
    LoadModel, MeasuredLoad, PLAN_JOBS_FAILING_MAX, TrialScope, TrialsOutcome,
    build_canonical_workflow, decide_by_simulation, derive_simulated_plan,
};
use bafs_workflow::{JobIndex, Volume, VolumeKind, Workflow, parse_duration_with_unit};
use serde::Serialize;

use crate::args::SimArgs;
use crate::home_view::HomeView;
use crate::live_environment::LinkRates;
use crate::{history, input_file, plan, workflow_file};

/// Jobs of a canonical workload that are simulated at most: each is a job in memory.
const JOBS_MAX: u64 = 10_000_000;

/// Parts of the batch volumes of a canonical workload at most, were each on every node: each takes
/// some 300 bytes of memory.
const CACHES_MAX: u64 = 20_000_000;

/// What is simulated.
#[derive(Debug)]
pub(super) struct Workload {
    pub(super) workflow: Workflow,
    pub(super) shape: Shape,
    pub(super) load: LoadModel,
    /// How it really went, when it is something that was run.
    pub(super) measured_run: Option<MeasuredRun>,
    site: Option<Site>,
    /// The line of each job in its file, of jobs that a table tells of.
    job_lines: Vec<usize>,
    /// Whether it was described as canonical.
    is_canonical: bool,
}

/// Something that was run before.
#[derive(Debug, Serialize)]
pub(super) struct MeasuredRun {
    /// How long it took, in seconds, when that is known.
    pub(super) duration_s: Option<f64>,
    /// What was left out or assumed.
    pub(super) remarks: Vec<String>,
}

impl Workload {
    /// What the arguments name.
    pub(super) fn from_args(args: &SimArgs) -> Result<Self> {
        if let Some(text) = &args.canonical {
            let canonical =
                CanonicalWorkload::parse(text).map_err(|e| anyhow!("--canonical: {e}"))?;
            let jobs = canonical.jobs();
            if jobs > JOBS_MAX {
                bail!("--canonical: {jobs} jobs are too many to simulate; the limit is {JOBS_MAX}");
            }
            return Ok(Self {
                is_canonical: true,
                ..Self::from_shape(build_canonical_workflow(&canonical), canonical.shape())
            });
        }
        if let Some(path) = &args.workflow {
            let workflow = workflow_file::load_workflow(path, &HomeView::from_environment(path))?;
            if workflow.jobs.is_empty() {
                bail!("{} has no jobs to simulate", path.display());
            }
            return match &args.trace {
                Some(path) => Self::from_trace(workflow, path),
                None => {
                    let shape = Shape::from_workflow(&workflow, args.variability);
                    Ok(Self::from_shape(workflow, shape))
                }
            };
        }
        Ok(Self::from_past_run(read_past_run(args)?))
    }

    fn from_shape(workflow: Workflow, shape: Shape) -> Self {
        let load = LoadModel::Declared {
            variability_ppm: (shape.variability * 1e6).round() as u64,
        };
        Self {
            workflow,
            shape,
            load,
            measured_run: None,
            site: None,
            job_lines: Vec::new(),
            is_canonical: false,
        }
    }

    /// A workflow whose jobs compute as a trace says, for what is predicted as well.
    fn from_trace(mut workflow: Workflow, path: &Path) -> Result<Self> {
        let measured = read_trace(&workflow, path)?;
        for (job, load) in workflow.jobs.iter_mut().zip(&measured.jobs) {
            job.runtime_s = Some(load.compute_us.div_ceil(1_000_000));
        }
        let shape = Shape::from_workflow(&workflow, variability(&measured));
        let shape = shape.with_times(&workflow, |job| computing_s(&measured, job));
        Ok(Self {
            load: LoadModel::Measured(measured),
            ..Self::from_shape(workflow, shape)
        })
    }

    fn from_past_run(past: PastRun) -> Self {
        let variability = variability(&past.measured);
        let (shape, _) = Shape::from_largest_levels(&past.workflow, variability);
        let shape = shape.with_times(&past.workflow, |job| computing_s(&past.measured, job));
        let before = MeasuredRun {
            duration_s: past.duration_s,
            remarks: past.remarks,
        };
        Self {
            shape,
            load: LoadModel::Measured(past.measured),
            workflow: past.workflow,
            measured_run: Some(before),
            site: past.site,
            job_lines: past.job_lines,
            is_canonical: false,
        }
    }

    /// Simulates candidates of a plan where the model cannot tell, as `bafs plan` does.
    pub(super) fn simulate_candidates(
        &self,
        plan: &mut Plan,
        environment: &Environment,
    ) -> Result<TrialsOutcome> {
        let jobs = self.workflow.jobs.len() as u64;
        let work = (jobs, || self.workflow.clone());
        let variability = self.shape.variability;
        // What is too large to be simulated need not be recognised either.
        let is_canonical = || CanonicalWorkload::recognise(&self.workflow, variability).is_ok();
        let doubt = match self.is_canonical || jobs > PLAN_JOBS_FAILING_MAX as u64 || is_canonical()
        {
            true => TrialScope::Ties,
            false => TrialScope::All,
        };
        let doubts = decide_by_simulation(plan, doubt, work, environment, &self.load);
        doubts.map_err(|stuck| anyhow!("cannot simulate a strategy: {stuck}"))
    }

    /// What a scheduler that plans by itself is told before it begins.
    pub(super) fn simulate_plan(&self, environment: &Environment) -> Result<Option<SimulatedPlan>> {
        let advice = derive_simulated_plan(
            &self.workflow,
            self.shape.variability,
            environment,
            &self.load,
        );
        advice.map_err(|stuck| anyhow!("cannot simulate a strategy: {stuck}"))
    }

    /// Space of each node that the scheduler left unused in the run that is simulated again, in
    /// thousandths.
    pub(super) fn slack_permille(&self) -> Option<u32> {
        self.site.as_ref().map(|site| site.slack_permille)
    }

    /// The machines: those of the environment file, else those of the run that is simulated again;
    /// with what the arguments change.
    pub(super) fn build_environment(&self, args: &SimArgs) -> Result<Environment> {
        let LinkRates { home, local } = LinkRates::parse_rates(&args.home_rate, &args.local_rate)?;
        let environment = match (&args.environment, &self.site) {
            (Some(path), _) => plan::read_environment(path)?,
            (None, Some(site)) => site_environment(site, home, local)?,
            (None, None) => bail!("nodes, storage and links are unknown; give --environment"),
        };
        let mut environment = environment.with_rates(home, local);
        if let Some(count) = args.nodes {
            let [kind] = &mut environment.nodes[..] else {
                bail!(
                    "--nodes {count}: the environment has {} kinds of node; give the number of \
                     each in the --environment file",
                    environment.nodes.len()
                );
            };
            kind.count = count;
        }
        if let Some(text) = &args.mtbf {
            environment.mtbf_s = Some(parse_mtbf(text)?);
        }
        self.check_processors(args, &environment)?;
        let checked = environment.validate();
        let environment = checked.map_err(|error| anyhow!("nodes and links: {}", error.message))?;
        if args.canonical.is_some() {
            self.check_cache_count(&environment)?;
        }
        Ok(environment)
    }

    fn check_cache_count(&self, environment: &Environment) -> Result<()> {
        let is_cache = |volume: &&Volume| matches!(volume.kind, VolumeKind::Cache { .. });
        let batch = self.workflow.volumes.iter().filter(is_cache).count() as u64;
        let nodes = environment.storing_nodes();
        if batch.saturating_mul(nodes) > CACHES_MAX {
            bail!(
                "--canonical: {batch} batch volumes on {nodes} nodes have too many partitions to \
                 simulate; the limit is {CACHES_MAX}"
            );
        }
        Ok(())
    }

    /// Refuses jobs that fit on no node, of a table with the line.
    fn check_processors(&self, args: &SimArgs, environment: &Environment) -> Result<()> {
        let Some((at, why)) = plan::find_oversized_job(&self.workflow, environment) else {
            return Ok(());
        };
        let file = args.from_slurm.as_ref().or(args.from_csv.as_ref());
        match self.job_lines.get(at).zip(file) {
            Some((line, file)) => bail!("{}: line {line}: {why}", file.display()),
            None => bail!(why),
        }
    }
}

/// The machines of a run, as far as its journal tells.
fn site_environment(site: &Site, home: Option<u64>, local: Option<u64>) -> Result<Environment> {
    let unknown = |name: &str, what: &str| {
        anyhow!(
            "the journal shows no rate of {what}, because the run moved too little data; give \
                 --{name}"
        )
    };
    let home = home.or(site.home_bytes_per_s);
    let local = local.or(site.local_bytes_per_s);
    let environment = Environment {
        nodes: site.nodes.clone(),
        home_bytes_per_s: home.ok_or_else(|| unknown("home-rate", "the link to home"))?,
        local_bytes_per_s: local.ok_or_else(|| unknown("local-rate", "the nodes' links"))?,
        mtbf_s: None,
        restart_s: RESTART_S_DEFAULT,
    };
    if environment.cpus() == 0 {
        bail!("no node of the past run had a processor");
    }
    Ok(environment)
}

/// Something that was run, from the file that the arguments name.
fn read_past_run(args: &SimArgs) -> Result<PastRun> {
    if let Some(path) = &args.from_journal {
        let path = history::find_journal(path)?;
        let past = past_runs::from_journal(journal::read_history(&path)?);
        return past.with_context(|| path.display().to_string());
    }
    let (path, is_slurm) = match (&args.from_slurm, &args.from_csv) {
        (Some(path), _) => (path, true),
        (None, Some(path)) => (path, false),
        (None, None) => {
            bail!("give a workflow file, --canonical, --from-journal, --from-slurm or --from-csv")
        }
    };
    let text = input_file::read_text(path, past_runs::FILE_BYTES_MAX).context("the past jobs")?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let past = match is_slurm {
        true => past_runs::from_slurm(&name, &text, to_permille(args.shared_fraction)),
        false => past_runs::from_csv(&name, &text),
    };
    past.with_context(|| Path::new(path).display().to_string())
}

fn read_trace(workflow: &Workflow, path: &Path) -> Result<MeasuredLoad> {
    let text = input_file::read_text(path, past_runs::FILE_BYTES_MAX).context("the trace")?;
    let measured = past_runs::from_trace(workflow, &text);
    measured.with_context(|| path.display().to_string())
}

fn to_permille(share: f64) -> u32 {
    (share.clamp(0.0, 1.0) * 1_000.0).round() as u32
}

/// What a job really computed, in seconds.
fn computing_s(measured: &MeasuredLoad, job: JobIndex) -> f64 {
    let load = measured.jobs.get(job.as_usize());
    load.map_or(0.0, |load| load.compute_us as f64 / 1e6)
}

/// Standard deviation of what jobs computed, as a share of the mean.
fn variability(measured: &MeasuredLoad) -> f64 {
    let times = measured.jobs.iter().map(|job| job.compute_us as f64);
    let count = measured.jobs.len().max(1) as f64;
    let mean = times.clone().sum::<f64>() / count;
    if mean <= 0.0 {
        return 0.0;
    }
    let square = times.map(|time| (time - mean).powi(2)).sum::<f64>() / count;
    (square.sqrt() / mean).min(10.0)
}

fn parse_mtbf(text: &str) -> Result<u64> {
    match parse_duration_with_unit(text) {
        Ok(0) => bail!("--mtbf is zero; give a duration such as 12h"),
        Ok(seconds) => Ok(seconds),
        Err(error) => bail!("--mtbf is invalid: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use bafs_sim::planner::NodeClass;
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, CliCommand};

    #[test]
    fn zero_mean_time_between_failures_is_refused() {
        assert_eq!(parse_mtbf("12 h").unwrap(), 43_200);
        assert!(
            parse_mtbf("0 s")
                .unwrap_err()
                .to_string()
                .contains("is zero")
        );
        let error = parse_mtbf("often").unwrap_err().to_string();
        assert!(error.contains("is invalid"), "{error}");
    }

    #[test]
    fn oversized_past_job_is_named_with_its_line() {
        let jobs = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(jobs.path(), "job,runtime,cpus\na,5,1\n\nb,5,2\n").unwrap();
        let path = jobs.path().to_str().unwrap();
        let thesis = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../examples/environments/thesis.toml"
        );
        let words = ["bafs", "sim", "--from-csv", path, "--environment", thesis];
        let CliCommand::Sim(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("another command");
        };
        let refused = Workload::from_args(&args)
            .unwrap()
            .build_environment(&args)
            .unwrap_err();
        let expected = format!("{path}: line 4: job 'b' needs 2 processors");
        assert!(refused.to_string().starts_with(&expected), "{refused}");
    }

    #[test]
    fn rate_missing_in_a_journal_is_requested() {
        let site = Site {
            nodes: vec![NodeClass::new(2, 1, 1_000)],
            slack_permille: 20,
            home_bytes_per_s: None,
            local_bytes_per_s: Some(7),
        };
        let error = site_environment(&site, None, None).unwrap_err().to_string();
        assert!(error.contains("give --home-rate"), "{error}");
        let environment = site_environment(&site, Some(3), None).unwrap();
        let rates = (environment.home_bytes_per_s, environment.local_bytes_per_s);
        assert_eq!(rates, (3, 7));
    }

    #[test]
    fn predictions_use_the_traced_run_times() {
        let none = |_: &str| Err("no files".to_owned());
        let text = "job a {\nexecutable = x\nruntime = 5 s\n}\n";
        let parsed = bafs_workflow::parse_workflow("w.bafs", text, &none);
        let workflow = parsed.unwrap().workflow;
        let trace = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(trace.path(), "job,compute\na,500\n").unwrap();
        let workload = Workload::from_trace(workflow, trace.path()).unwrap();
        assert_eq!(workload.shape.run_s, 500.0);
    }

    #[test]
    fn rate_options_override_rates_of_nodes() {
        let environment = tempfile::NamedTempFile::new().unwrap();
        let text = "home-rate = \"1 MB/s\"\nlocal-rate = \"12 MB/s\"\n\n[[nodes]]\n\
                    count = 50\ncpus = 1\nstorage = \"5 GB\"\nlocal-rate = \"9 MB/s\"\n\
                    home-rate = \"2 MB/s\"\n";
        std::fs::write(environment.path(), text).unwrap();
        let path = environment.path().to_str().unwrap();
        let canonical = "width=4,depth=2,batch=1GB,private=1GB,run=5s";
        let words = ["bafs", "sim", "--canonical", canonical];
        let words = words.into_iter().chain(["--environment", path]);
        let words = words.chain(["--home-rate", "8MB/s", "--local-rate", "7MB/s"]);
        let CliCommand::Sim(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("another command");
        };
        let found = Workload::from_args(&args)
            .unwrap()
            .build_environment(&args)
            .unwrap();
        let rates = (found.home_bytes_per_s, found.local_bytes_per_s);
        assert_eq!(rates, (8_000_000, 7_000_000));
        let class = &found.nodes[0];
        let own = (class.home_bytes_per_s, class.local_bytes_per_s);
        assert_eq!(own, (None, None));
    }

    #[test]
    fn environment_options_are_checked_like_a_file() {
        let environment = tempfile::NamedTempFile::new().unwrap();
        let text = "home-rate = \"1 MB/s\"\nlocal-rate = \"12 MB/s\"\n\n[[nodes]]\n\
                    count = 50\ncpus = 1\nstorage = \"10 TB\"\n";
        std::fs::write(environment.path(), text).unwrap();
        let refused = |count: &str| {
            let path = environment.path().to_str().unwrap();
            let canonical = "width=4,depth=50,batch=1GB,private=1GB,run=5s";
            let words = [
                "bafs",
                "sim",
                "--canonical",
                canonical,
                "--environment",
                path,
            ];
            let words = words.into_iter().chain(["--nodes", count]);
            let CliCommand::Sim(args) = Cli::try_parse_from(words).unwrap().command else {
                panic!("another command");
            };
            let workload = Workload::from_args(&args).unwrap();
            workload.build_environment(&args).unwrap_err().to_string()
        };
        for (count, expected) in [
            ("4000000000", "4000000000 nodes are too many"),
            ("900000", "larger than 8000 PB"),
            (
                "500000",
                "50 batch volumes on 500000 nodes have too many partitions",
            ),
        ] {
            let error = refused(count);
            assert!(error.contains(expected), "{error}");
        }
    }
}
