//! The workflows of `examples/`, run as their READMEs say: inputs made, the text checked, the
//! workflow run on a throw-away cluster, and the results checked.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use bafs_tests::external_servers::start_object_store;
use bafs_tests::{bafs_program, find_tool, mount_obstacle, printed_text, report_skip};
use tempfile::TempDir;

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

/// A copy of an example, in which its commands run.
struct Example {
    name: &'static str,
    directory: TempDir,
}

impl Example {
    /// Copies an example; `None`, said aloud, where it cannot run.
    fn copy(test: &str, name: &'static str, programs: &[&str]) -> Result<Option<Self>> {
        if let Some(reason) = mount_obstacle() {
            report_skip(test, &reason);
            return Ok(None);
        }
        if let Some(missing) = programs.iter().find(|it| find_tool(it).is_none()) {
            report_skip(
                test,
                &format!("there is no {missing}; run `cargo xtask setup`"),
            );
            return Ok(None);
        }
        let directory = tempfile::tempdir()?;
        for entry in std::fs::read_dir(examples().join(name))? {
            let entry = entry?;
            std::fs::copy(entry.path(), directory.path().join(entry.file_name()))?;
        }
        Ok(Some(Self { name, directory }))
    }

    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.directory).stdin(Stdio::null());
        command
    }

    fn check(&self) -> Result<Output> {
        Ok(self.command("./check.sh").output()?)
    }

    /// Does what the README says, then shows that `check.sh` rejects results that are not there.
    fn run(&self, variables: &[(&str, &str)]) -> Result<()> {
        let workflow = format!("{}.bafs", self.name);
        let bafs = |args: &[&str]| {
            let mut command = self.command(bafs_program());
            command.args(args);
            command
        };
        let steps = [
            self.command("./prepare.sh"),
            bafs(&["check", &workflow]),
            bafs(&["run", &workflow, "--local", "2"]),
        ];
        for mut step in steps {
            let output = step.envs(variables.iter().copied()).output()?;
            let printed = printed_text(&output);
            ensure!(output.status.success(), "{step:?}: {printed}");
            ensure!(!printed.contains("warning:"), "{step:?} warns: {printed}");
        }
        let checked = self.check()?;
        ensure!(checked.status.success(), printed_text(&checked));
        std::fs::remove_dir_all(self.directory.path().join("results"))?;
        let checked = self.check()?;
        ensure!(checked.status.code() == Some(1), printed_text(&checked));
        ensure!(checked.stderr.starts_with(b"check: "), "no reason is given");
        Ok(())
    }
}

fn run_example(test: &str, name: &'static str, programs: &[&str]) -> Result<()> {
    Example::copy(test, name, programs)?.map_or(Ok(()), |example| example.run(&[]))
}

#[test]
fn blast_example_finds_the_source_of_queries() -> Result<()> {
    let name = "blast_example_finds_the_source_of_queries";
    run_example(name, "blast", &["blastp", "makeblastdb"])
}

#[test]
fn hmmer_example_annotates_proteins_with_their_family() -> Result<()> {
    let name = "hmmer_example_annotates_proteins_with_their_family";
    run_example(name, "hmmer", &["hmmbuild", "hmmpress", "hmmscan"])
}

#[test]
fn bwa_example_merges_reads_of_all_lanes() -> Result<()> {
    let name = "bwa_example_merges_reads_of_all_lanes";
    run_example(name, "bwa", &["bwa", "samtools"])
}

#[test]
fn sweep_example_agrees_with_the_formula() -> Result<()> {
    run_example("sweep_example_agrees_with_the_formula", "sweep", &["awk"])
}

#[test]
fn samples_example_counts_every_row() -> Result<()> {
    run_example("samples_example_counts_every_row", "samples", &["awk"])
}

#[test]
fn chain_example_reduces_a_large_intermediate() -> Result<()> {
    let name = "chain_example_reduces_a_large_intermediate";
    run_example(name, "chain", &["awk"])
}

#[test]
fn s3_example_reads_inputs_from_a_bucket() -> Result<()> {
    let name = "s3_example_reads_inputs_from_a_bucket";
    let Some(example) = Example::copy(name, "s3", &["awk"])? else {
        return Ok(());
    };
    let buckets = example.directory.path().join("buckets");
    let Some((_server, settings)) = start_object_store(&buckets)? else {
        report_skip(name, "there is no s3s-fs; `cargo xtask test` builds it");
        return Ok(());
    };
    let endpoint = settings.split("endpoint = \"").nth(1);
    let endpoint = endpoint.and_then(|rest| rest.split('"').next());
    let endpoint = endpoint.context("the server has an address")?;
    let homes = example.directory.path().join("homes.toml");
    let homes = homes.to_str().context("a path of text")?;
    example.run(&[("S3_ENDPOINT", endpoint), ("BAFS_HOMES", homes)])
}

#[test]
fn every_example_has_scripts_and_a_test() -> Result<()> {
    let tests = include_str!("cluster_examples.rs");
    let mut examples_found = 0;
    for entry in std::fs::read_dir(examples())? {
        let folder = entry?.path();
        let is_workflow = |file: &Path| file.extension().is_some_and(|it| it == "bafs");
        if !folder.is_dir()
            || !std::fs::read_dir(&folder)?
                .flatten()
                .any(|it| is_workflow(&it.path()))
        {
            continue;
        }
        let name = folder.file_name().and_then(|it| it.to_str());
        let name = name.context("a name of text")?;
        examples_found += 1;
        for file in [&format!("{name}.bafs"), "README.md"] {
            ensure!(folder.join(file).is_file(), "{name} has no {file}");
        }
        for script in ["prepare.sh", "check.sh"] {
            let found = std::fs::metadata(folder.join(script));
            let is_program = found.is_ok_and(|it| it.permissions().mode() & 0o111 != 0);
            ensure!(is_program, "{name} has no program {script}");
        }
        let test = format!("fn {name}_example_");
        ensure!(tests.contains(&test), "{name} has no test");
    }
    ensure!(examples_found >= 7, "{examples_found} examples");
    Ok(())
}
