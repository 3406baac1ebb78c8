//! Snakemake, of the version that the integrations are tested with, in an environment of its own.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::printed_text;

/// The packages that the integrations are tested with.
const REQUIREMENTS: &str = include_str!("../../../../integrations/tests/requirements.txt");

/// A directory that has it already: the variable that `integrations/tests/run.sh` knows, too.
const ENVIRONMENT_VARIABLE: &str = "BAFS_PYTHON_ENVIRONMENT";

/// An installed Snakemake.
pub(super) struct Snakemake {
    program: PathBuf,
    _directory: Option<TempDir>,
}

impl Snakemake {
    /// Installs it, unless a directory is named that has it.
    ///
    /// # Errors
    /// There is no Python, or PyPI gives nothing.
    pub(super) fn install() -> Result<Self> {
        let named = std::env::var_os(ENVIRONMENT_VARIABLE).map(PathBuf::from);
        let (directory, environment) = match named {
            Some(named) => (None, named),
            None => {
                let directory = tempfile::tempdir()?;
                let path = directory.path().join("venv");
                (Some(directory), path)
            }
        };
        let program = environment.join("bin/snakemake");
        if !program.exists() {
            let wanted = REQUIREMENTS
                .lines()
                .find(|it| it.starts_with("snakemake=="));
            let wanted = wanted.context("the requirements name Snakemake")?;
            run(Command::new("python3")
                .args(["-m", "venv"])
                .arg(&environment))?;
            let mut pip = Command::new(environment.join("bin/pip"));
            run(pip.args(["install", "--quiet", "--disable-pip-version-check", wanted]))?;
        }
        Ok(Self {
            program,
            _directory: directory,
        })
    }

    /// Runs the Snakefile of a directory; the jobs that ended well.
    ///
    /// # Errors
    /// It ends otherwise than it should.
    pub(super) fn run(&self, directory: &Path, is_fine: bool) -> Result<BTreeSet<String>> {
        let log = directory.join("ran.log");
        fs::write(&log, "")?;
        let mut command = Command::new(&self.program);
        command.args(["--cores", "2", "--keep-going", "--rerun-incomplete"]);
        // Nothing of it goes to the user's cache.
        command.env("XDG_CACHE_HOME", directory.join(".cache"));
        let output = command.current_dir(directory).output()?;
        ensure!(output.status.success() == is_fine, printed_text(&output));
        let ran = fs::read_to_string(&log)?;
        Ok(ran.lines().map(str::to_owned).collect())
    }
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    ensure!(output.status.success(), printed_text(&output));
    Ok(())
}
