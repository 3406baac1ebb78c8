//! `cargo xtask dist`: what users install. Builds the static program and the wheel with it by one
//! optimised build, makes the Debian package, and tries both.

mod deb;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::shell;

/// The builder of wheels. Its later versions may name wheels in another way.
const MATURIN: &str = "maturin>=1.7,<2";

/// The largest wheel; PyPI takes 100 MB, but users wait for it.
const WHEEL_BYTES_MAX: u64 = 40_000_000;

/// What to make.
#[derive(Debug, Clone, Args)]
pub(crate) struct DistArguments {
    /// Package the program of the tests, dynamic and not optimised: to try this command.
    #[arg(long)]
    debug: bool,
    /// Package this program, and build none: no wheel.
    #[arg(long, value_name = "FILE", conflicts_with = "debug")]
    program: Option<PathBuf>,
    /// Directory for the results; defaults to `dist` below cargo's target directory.
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Makes everything, tries it, and lists it with sizes.
pub(crate) fn run_dist(arguments: &DistArguments) -> Result<()> {
    let output = match &arguments.output {
        Some(output) => std::path::absolute(output)?,
        None => shell::target_directory()?.join("dist"),
    };
    fs::create_dir_all(&output)?;
    let (program, wheel) = match &arguments.program {
        Some(program) => (std::path::absolute(program)?, None),
        None => {
            let (program, wheel) = build_wheel(&output, arguments.debug)?;
            (program, Some(wheel))
        }
    };
    // To compress a program with all its symbols as well as xz can takes minutes.
    let compression: &[&str] = match wheel.is_some() && !arguments.debug {
        true => &["-Zxz"],
        false => &["-Zgzip", "-z1"],
    };
    let package = deb::build_package(&program, &output, compression)?;
    deb::check_package(&package, &output)?;
    if let Some(wheel) = &wheel {
        try_wheel(wheel, &output)?;
    }
    let linkage = if is_static(&program)? {
        "static"
    } else {
        "dynamic"
    };
    println!("\ndist: {linkage} program {}", describe(&program)?);
    for file in wheel.iter().chain([&package]) {
        println!("dist: {}", describe(file)?);
    }
    Ok(())
}

fn describe(file: &Path) -> Result<String> {
    let bytes = fs::metadata(file)?.len();
    Ok(format!("{} ({:.1} MB)", file.display(), bytes as f64 / 1e6))
}

/// Builds the program and its wheel; returns the paths of both.
///
/// The program is linked with the C library itself: one file for every Linux of this processor,
/// and a wheel for every age of that library.
fn build_wheel(output: &Path, is_debug: bool) -> Result<(PathBuf, PathBuf)> {
    let environment = ensure_maturin()?;
    for old in list_wheels(output)? {
        fs::remove_file(old)?;
    }
    let mut command = Command::new(environment.join("bin/maturin"));
    command
        .args(["build", "--locked", "--out"])
        .arg(output)
        .current_dir(shell::checkout_root().join("integrations/python"));
    let mut program = shell::target_directory()?;
    if is_debug {
        // The program of the tests: it is built already.
        program.push("debug/bafs");
    } else {
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        command.args(["--release", "--target", &target]);
        command.env("RUSTFLAGS", "-C target-feature=+crt-static");
        program.extend([target.as_str(), "release", "bafs"]);
    }
    shell::run_command(&mut command)?;
    let mut wheels = list_wheels(output)?;
    let wheel = wheels.pop().context("maturin made no wheel")?;
    ensure!(
        is_debug || is_static(&program)?,
        "{} needs shared libraries",
        program.display()
    );
    Ok((program, wheel))
}

fn list_wheels(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|it| it == "whl") {
            found.push(path);
        }
    }
    Ok(found)
}

/// A virtual environment with maturin, made once.
fn ensure_maturin() -> Result<PathBuf> {
    let environment = shell::target_directory()?.join("tools/maturin");
    if !environment.join("bin/maturin").is_file() {
        create_environment(&environment)?;
        install(&environment, MATURIN)?;
    }
    Ok(environment)
}

fn create_environment(directory: &Path) -> Result<()> {
    let mut command = Command::new("python3");
    shell::run_command(command.args(["-m", "venv", "--clear"]).arg(directory))
}

fn install(environment: &Path, what: &str) -> Result<()> {
    let mut command = Command::new(environment.join("bin/pip"));
    let options = ["install", "--quiet", "--disable-pip-version-check"];
    shell::run_command(command.args(options).arg(what))
}

/// Whether a program needs no shared library.
fn is_static(program: &Path) -> Result<bool> {
    let mut command = Command::new("readelf");
    let dynamic = shell::run_for_output(command.args(["--dynamic", "--wide"]).arg(program))?;
    Ok(!dynamic.contains("(NEEDED)"))
}

/// Installs the wheel into an empty environment, uses the module, and runs the small demo.
fn try_wheel(wheel: &Path, output: &Path) -> Result<()> {
    let bytes = fs::metadata(wheel)?.len();
    let name = wheel.file_name().unwrap_or_default().to_string_lossy();
    if bytes > WHEEL_BYTES_MAX {
        bail!("{name} has {bytes} bytes, more than {WHEEL_BYTES_MAX}");
    }
    ensure!(name.contains("manylinux"), "{name} has no manylinux tag");
    let environment = output.join("trial");
    create_environment(&environment)?;
    install(&environment, &wheel.to_string_lossy())?;
    let bin = environment.join("bin");
    let mut module = Command::new(bin.join("python"));
    let line = "import bafs, os; p = bafs.find_program(); print(p); \
                assert p.startswith(os.path.dirname(__import__('sys').executable))";
    shell::run_command(module.args(["-c", line]).env_remove("BAFS_BIN"))?;
    let mut demo = Command::new(bin.join("bafs"));
    shell::run_command(demo.args(["demo", "--small"]).current_dir(output))?;
    Ok(fs::remove_dir_all(environment)?)
}
