//! Workflows whose results are known: made by a seed, and computed once more by a shell without
//! BAFS. Runs no cluster.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::seeded_rng::SeededRng;

/// Stages of each pipeline; one job more gathers what all of them made.
pub const LEVELS: u32 = 3;

/// The input of all jobs of a first and second level.
pub const SHARED_DATA_PATH: &str = "data/all";

/// How the volume of a stage is declared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SizeDeclaration {
    /// It may hold so much, exactly.
    Declared,
    /// The size is unknown.
    Unknown,
    /// Jobs of its node work on the directory itself.
    Watched,
}

impl SizeDeclaration {
    fn text(self) -> &'static str {
        match self {
            Self::Declared => "2 MB files 16",
            Self::Unknown => "unknown",
            Self::Watched => "16 MB files 64 watched",
        }
    }
}

/// A workflow of pipelines of three stages and a job that gathers.
#[derive(Debug)]
pub struct Workload {
    user: String,
    /// How the volumes of each pipeline are declared, stage by stage.
    pipelines: Vec<[SizeDeclaration; LEVELS as usize]>,
    /// How long a job waits in the midst of its writing.
    pause: Duration,
}

/// Most pipelines with a watched volume: each keeps 83 MB of a node.
const WATCHED_PIPELINES_MAX: u64 = 2;

impl Workload {
    /// One that follows the dice; its jobs take `least` together on so many slots.
    pub fn new(user: &str, rng: &mut SeededRng, least: Duration, slots: u32) -> Self {
        let count = 10 + rng.next_below(11);
        let watched = 1 + rng.next_below(WATCHED_PIPELINES_MAX);
        let unknown = 2 + rng.next_below(4);
        let sizes = |at: u64| match at {
            at if at < watched => [
                SizeDeclaration::Declared,
                SizeDeclaration::Watched,
                SizeDeclaration::Declared,
            ],
            at if at < watched + unknown => [SizeDeclaration::Unknown; LEVELS as usize],
            _ => [SizeDeclaration::Declared; LEVELS as usize],
        };
        Self::with_pipelines(user, (0..count).map(sizes).collect(), least, slots)
    }

    /// One of declared sizes, with so many pipelines.
    pub fn with_declared_sizes(user: &str, pipelines: usize, least: Duration, slots: u32) -> Self {
        let sizes = [SizeDeclaration::Declared; LEVELS as usize];
        Self::with_pipelines(user, vec![sizes; pipelines], least, slots)
    }

    fn with_pipelines(
        user: &str,
        pipelines: Vec<[SizeDeclaration; LEVELS as usize]>,
        least: Duration,
        slots: u32,
    ) -> Self {
        let mut workload = Self {
            user: user.to_owned(),
            pipelines,
            pause: Duration::ZERO,
        };
        workload.pause = least * slots / workload.jobs();
        workload
    }

    /// The user of the run.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// Number of jobs.
    pub fn jobs(&self) -> u32 {
        LEVELS * self.job_count() + 1
    }

    fn job_count(&self) -> u32 {
        u32::try_from(self.pipelines.len()).unwrap_or(u32::MAX)
    }

    /// The input of the jobs of all first levels.
    pub fn shared_data() -> Vec<u8> {
        let lines = (0..50_000u32).map(|n| format!("{n}\n"));
        lines.flat_map(String::into_bytes).collect()
    }

    /// The workflow, as a user writes it.
    pub fn workflow_text(&self) -> String {
        let user = &self.user;
        let mut text = String::from("volume data cache bafs://home/data 1 MB\n");
        text += "volume sum scratch 2 MB files 16\n";
        for p in 0..self.job_count() {
            for stage in 0..LEVELS {
                let size = self.pipelines[p as usize][stage as usize].text();
                let job = format!("j{p}_{stage}");
                let script = self.job_script(p, stage, &ScriptPaths::in_job());
                let _ = write!(
                    text,
                    "volume v{p}_{stage} scratch {size}\n{}mount v{p}_{stage} {job} /out\n",
                    declare_job(&job, &script)
                );
                if stage < 2 {
                    let _ = writeln!(text, "mount data {job} /data");
                }
                if stage > 0 {
                    let before = stage - 1;
                    let _ = writeln!(text, "mount v{p}_{before} {job} /in ro");
                    let _ = writeln!(text, "parent j{p}_{before} child {job}");
                }
            }
            let last = LEVELS - 1;
            let _ = writeln!(text, "mount v{p}_{last} gather /in/{p} ro");
            let _ = writeln!(text, "parent j{p}_{last} child gather");
            let _ = writeln!(text, "extract v{p}_{last} out bafs://home/out/{user}/{p}");
        }
        text += &declare_job("gather", &self.gather_script(&ScriptPaths::in_job()));
        let _ = writeln!(text, "mount sum gather /out");
        let _ = writeln!(text, "extract sum out bafs://home/out/{user}/all");
        text
    }

    /// Makes all results in a directory, without BAFS, from the cache's files in `data`.
    ///
    /// # Errors
    /// The shell fails.
    pub fn compute_expected(&self, data: &Path, directory: &Path) -> Result<Vec<ExpectedFile>> {
        let mut script = String::new();
        for p in 0..self.job_count() {
            for stage in 0..LEVELS {
                let own = directory.join(format!("v{p}_{stage}"));
                std::fs::create_dir_all(&own)?;
                let before = directory.join(format!("v{p}_{}", stage.saturating_sub(1)));
                let places = ScriptPaths::on_host(data, &before, &own);
                script += &self.job_script(p, stage, &places);
                script += "\n";
            }
            let last = directory.join(format!("v{p}_{}", LEVELS - 1));
            std::fs::create_dir_all(directory.join("in"))?;
            std::os::unix::fs::symlink(last, directory.join("in").join(p.to_string()))?;
        }
        let own = directory.join("sum");
        std::fs::create_dir_all(&own)?;
        script += &self.gather_script(&ScriptPaths::on_host(data, &directory.join("in"), &own));
        let output = Command::new("sh").args(["-c", &script]).output()?;
        ensure!(output.status.success(), "{}", crate::printed_text(&output));
        let last = LEVELS - 1;
        let names = (0..self.job_count()).map(|p| (p.to_string(), format!("v{p}_{last}")));
        let all = names.chain([("all".to_owned(), "sum".to_owned())]);
        all.map(|(name, volume)| {
            let content = std::fs::read(directory.join(volume).join("out"))?;
            let path = format!("out/{}/{name}", self.user);
            Ok(ExpectedFile { path, content })
        })
        .collect()
    }

    fn job_script(&self, p: u32, stage: u32, places: &ScriptPaths) -> String {
        let ScriptPaths {
            data, input, out, ..
        } = places;
        let pause = places.pause_command(self.pause);
        let last = 2_000 + 50 * p;
        let work = match stage {
            0 => format!(
                "cksum < {data}/all > {out}/part; seq {p} {last} >> {out}/part; {pause}; \
                 echo pipeline {p} >> {out}/part"
            ),
            1 => format!(
                "cat {input}/out > {out}/part; {pause}; cksum < {input}/out >> {out}/part; \
                 tail -c 5000 {data}/all >> {out}/part"
            ),
            _ => format!(
                "sort {input}/out > {out}/part; {pause}; cksum < {out}/part > {out}/sum; \
                 cat {out}/sum >> {out}/part"
            ),
        };
        format!("set -e; export LC_ALL=C; {work}; mv {out}/part {out}/out")
    }

    fn gather_script(&self, places: &ScriptPaths) -> String {
        let ScriptPaths { input, out, .. } = places;
        let mut script = format!("set -e; export LC_ALL=C; : > {out}/part");
        for p in 0..self.job_count() {
            let _ = write!(script, "; cksum < {input}/{p}/out >> {out}/part");
            let _ = write!(script, "; head -n 3 {input}/{p}/out >> {out}/part");
        }
        script + &format!("; mv {out}/part {out}/out")
    }
}

fn declare_job(job: &str, script: &str) -> String {
    format!("job {job} {{\nexecutable = /bin/sh\narguments = -c \"{script}\"\n}}\n")
}

/// A file that must come home.
#[derive(Debug)]
pub struct ExpectedFile {
    /// Below home's directory.
    pub path: String,
    /// The content.
    pub content: Vec<u8>,
}

/// The paths of a script's inputs and outputs.
struct ScriptPaths {
    data: String,
    input: String,
    out: String,
    has_pauses: bool,
}

impl ScriptPaths {
    fn in_job() -> Self {
        Self {
            data: "/data".to_owned(),
            input: "/in".to_owned(),
            out: "/out".to_owned(),
            has_pauses: true,
        }
    }

    fn on_host(data: &Path, input: &Path, out: &Path) -> Self {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        Self {
            data: text(data),
            input: text(input),
            out: text(out),
            has_pauses: false,
        }
    }

    fn pause_command(&self, pause: Duration) -> String {
        match self.has_pauses {
            true => format!("sleep {:.2}", pause.as_secs_f64()),
            false => "true".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads_follow_their_seed() {
        let make = |seed| {
            Workload::new(
                "alice",
                &mut SeededRng::new(seed),
                Duration::from_secs(20),
                10,
            )
        };
        assert_eq!(make(1).workflow_text(), make(1).workflow_text());
        assert_ne!(make(1).workflow_text(), make(2).workflow_text());
        for seed in 0..20 {
            let jobs = make(seed).jobs();
            assert!((31..=61).contains(&jobs), "{jobs} jobs");
        }
    }

    #[test]
    fn expected_results_come_from_a_shell() {
        let workload = Workload::with_declared_sizes("bob", 2, Duration::from_secs(9), 10);
        let (data, directory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(data.path().join("all"), Workload::shared_data()).unwrap();
        let made = workload.compute_expected(data.path(), directory.path());
        let made = made.expect("results");
        let paths: Vec<&str> = made.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["out/bob/0", "out/bob/1", "out/bob/all"]);
        let lines = |at: usize| made[at].content.split(|&byte| byte == b'\n').count() - 1;
        assert!(lines(0) > 1 && lines(1) > 1, "numbers and a checksum");
        assert_eq!(lines(2), 8, "a checksum and three lines of each pipeline");
        assert_ne!(made[0].content, made[1].content);
    }
}
