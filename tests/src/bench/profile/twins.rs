//! Twins of the thesis' applications: programs that make exactly the traffic of Table 2.4, and what
//! the profile says of them. Bytes and operations are divided by a scale.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::trace_command;
use crate::bench::BenchmarkReport;

/// Hidden first argument: this process is a twin of a stage.
pub(in crate::bench) const TWIN_PROCESS: &str = "--profile-twin";

/// Roles in the order of the table.
const ROLES: [&str; 3] = ["endpoint", "pipeline", "batch"];
/// What is less than this is rounded too much in the table to be compared, in MB.
const COMPARED_MB_MIN: f64 = 0.1;
const INSTANCES: [&str; 2] = ["1", "2"];

/// Files, and MB of traffic, unique and static.
type RoleFigures = (u64, f64, f64, f64);

/// A stage: its figures by role, reads and writes of Table 2.3, and whether it maps batch data.
struct TwinStage {
    name: &'static str,
    roles: [RoleFigures; 3],
    operations: f64,
    is_mapped: bool,
}

const fn stage(name: &'static str, operations: f64, roles: [RoleFigures; 3]) -> TwinStage {
    TwinStage {
        name,
        roles,
        operations,
        is_mapped: false,
    }
}

const NONE: RoleFigures = (0, 0.0, 0.0, 0.0);

#[rustfmt::skip]
#[expect(clippy::approx_constant, reason = "the table has 3.14 MB")]
const STAGES: &[TwinStage] = &[
    stage("seti", 97_138.0, [(2, 0.34, 0.34, 0.34), (12, 75.43, 2.68, 2.68), NONE]),
    TwinStage {
        is_mapped: true,
        ..stage("blastp", 86_103.0, [(2, 0.12, 0.12, 0.12), NONE, (9, 329.99, 323.46, 586.09)])
    },
    stage("ibis", 55_851.0,
        [(20, 179.92, 53.97, 53.97), (99, 148.27, 12.69, 12.69), (17, 7.89, 6.98, 6.98)]),
    stage("cmkin", 494.0, [(2, 0.07, 0.07, 0.07), (1, 7.42, 3.81, 3.81), NONE]),
    stage("cmsim", 971_327.0,
        [(6, 63.50, 63.13, 63.13), (1, 5.56, 3.81, 3.81), (9, 3729.67, 49.04, 59.24)]),
    stage("setup", 1_796.0, [(3, 0.14, 0.14, 0.14), (2, 8.99, 0.26, 0.26), NONE]),
    stage("argos", 127_577.0, [(3, 1.81, 1.81, 1.81), (2, 661.95, 661.93, 662.17), NONE]),
    stage("scf", 510_564.0, [NONE, (7, 3983.39, 664.59, 664.59), NONE]),
    stage("nautilus", 63_668.0,
        [(6, 1.18, 1.10, 1.10), (9, 266.32, 28.66, 28.66), (2, 3.14, 3.14, 3.14)]),
    stage("bin2coord", 98_732.0, [NONE, (241, 403.25, 273.85, 273.85), NONE]),
    stage("rasmol", 33_413.0, [(119, 12.88, 12.88, 12.88), (120, 115.79, 115.79, 115.79), NONE]),
    stage("corsika", 6_142.0, [NONE, (3, 23.17, 23.17, 23.17), (3, 0.75, 0.75, 0.75)]),
    stage("corama", 12_664.0, [NONE, (3, 49.37, 49.37, 49.37), NONE]),
    stage("mmc", 1_141_592.0, [NONE, (6, 151.63, 151.63, 151.63), (5, 2.73, 2.73, 2.73)]),
    stage("amasim2", 601.0,
        [(5, 5.31, 5.31, 5.31), (2, 40.00, 40.00, 125.43), (22, 505.04, 505.04, 505.04)]),
];

/// Bytes of one file of a stage.
#[derive(Debug, Clone, Copy)]
struct TwinFile {
    traffic: u64,
    unique: u64,
    size: u64,
}

impl TwinStage {
    /// The files of a role: the figures in equal parts, the first one with what is left.
    fn files(&self, role: usize, scale: u64) -> Vec<TwinFile> {
        let (count, traffic, unique, size) = self.roles[role];
        let part = |mb: f64, at: u64| {
            let bytes = (mb * 1e6) as u64 / scale;
            bytes / count + if at == 0 { bytes % count } else { 0 }
        };
        let file = |at| TwinFile {
            traffic: part(traffic, at),
            unique: part(unique, at),
            size: part(size, at),
        };
        (0..count).map(file).collect()
    }

    /// Bytes of an operation.
    fn chunk(&self) -> u64 {
        let mb: f64 = self.roles.iter().map(|(_, traffic, ..)| traffic).sum();
        ((mb * 1e6 / self.operations) as u64).clamp(1, 1 << 20)
    }

    fn is_mapping(&self, role: usize) -> bool {
        self.is_mapped && role == 2
    }
}

/// Ranges that bring `total` bytes of the first `unique` ones of a file, from `done` on.
fn ranges(mut left: u64, unique: u64) -> Vec<u64> {
    let mut all = Vec::new();
    while left > 0 && unique > 0 {
        all.push(left.min(unique));
        left -= left.min(unique);
    }
    all
}

fn run_operations(
    bytes: u64,
    chunk: u64,
    mut operation: impl FnMut(u64, u64) -> Result<()>,
) -> Result<()> {
    let mut offset = 0;
    while offset < bytes {
        let length = chunk.min(bytes - offset);
        operation(offset, length)?;
        offset += length;
    }
    Ok(())
}

/// Reads and writes of a stage, apart from those of a mapping.
fn count_operations(stage: &TwinStage, scale: u64) -> u64 {
    let chunk = stage.chunk();
    let mut count = 0;
    for role in 0..ROLES.len() {
        for file in stage.files(role, scale) {
            let (once, more) = (file.unique, file.traffic.saturating_sub(file.unique));
            let first = if stage.is_mapping(role) {
                0
            } else {
                once.div_ceil(chunk)
            };
            let again = ranges(more, once)
                .into_iter()
                .map(|bytes| bytes.div_ceil(chunk));
            count += first + again.sum::<u64>();
        }
    }
    count
}

fn batch_path(directory: &Path, stage: &str, at: usize) -> PathBuf {
    directory.join("batch").join(format!("{stage}-{at}"))
}

/// The twin: its stage, its instance, and the scale are its arguments.
pub(in crate::bench) fn run_twin_process(arguments: &[String]) -> Result<()> {
    let [name, instance, scale] = arguments else {
        bail!("a stage, an instance and a scale are needed");
    };
    let stage = STAGES.iter().find(|stage| stage.name == name);
    let stage = stage.context("no such stage")?;
    let (scale, chunk) = (scale.parse()?, stage.chunk());
    let mut buffer = vec![7; chunk as usize];
    for (at, file) in stage.files(2, scale).into_iter().enumerate() {
        let path = batch_path(Path::new("."), name, at);
        let opened = File::open(&path)?;
        let more = ranges(file.traffic.saturating_sub(file.unique), file.unique);
        let mut passes = more;
        match stage.is_mapping(2) {
            true => map_file(&path, file.unique)?,
            false => passes.insert(0, file.unique),
        }
        for bytes in passes {
            run_operations(bytes, chunk, |offset, length| {
                Ok(opened.read_exact_at(&mut buffer[..length as usize], offset)?)
            })?;
        }
    }
    for (role, role_name) in ROLES.iter().enumerate().take(2) {
        for (at, file) in stage.files(role, scale).into_iter().enumerate() {
            let path = PathBuf::from(format!("{role_name}-{name}-{instance}-{at}"));
            let mut options = OpenOptions::new();
            let written = options
                .write(true)
                .create(true)
                .truncate(true)
                .open(&path)?;
            let write =
                |offset, length: u64| Ok(written.write_all_at(&buffer[..length as usize], offset)?);
            run_operations(file.unique, chunk, write)?;
            written.set_len(file.size.max(file.unique))?;
            let more = ranges(file.traffic.saturating_sub(file.unique), file.unique);
            if role == 0 {
                for bytes in more {
                    run_operations(bytes, chunk, write)?;
                }
                continue;
            }
            drop(written);
            let read = File::open(&path)?;
            let mut own = vec![0; chunk as usize];
            for bytes in more {
                run_operations(bytes, chunk, |offset, length| {
                    Ok(read.read_exact_at(&mut own[..length as usize], offset)?)
                })?;
            }
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

/// Touches each page of the first bytes of a file in a mapping. No safe crate maps files.
fn map_file(path: &Path, bytes: u64) -> Result<()> {
    let program = "import mmap, sys\n\
        with open(sys.argv[1], 'rb') as file:\n\
        \x20   pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n\
        \x20   sum(pages[at] for at in range(0, int(sys.argv[2]), 4096))\n";
    let status = Command::new("python3")
        .args(["-c", program])
        .arg(path)
        .arg(bytes.to_string())
        .status()?;
    ensure!(status.success(), "python3 cannot map {}", path.display());
    Ok(())
}

/// Traces two instances of each twin. Answers the largest relative error of bytes, and of counts of
/// operations.
pub(super) fn compare_twins(scale: u64, report: &mut BenchmarkReport) -> Result<(f64, f64)> {
    let head = ["stage", "role", "figure", "table MB", "profile MB"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let (mut error_max, mut operations_error_max) = (0.0f64, 0.0f64);
    for stage in STAGES {
        let traffic = trace_twin(stage, scale)?;
        for role in 0..ROLES.len() {
            let error = compare_role(stage, role, scale, (&traffic, &mut rows))?;
            error_max = error_max.max(error);
        }
        let error = compare_operations(stage, scale, &traffic)?;
        operations_error_max = operations_error_max.max(error);
    }
    report.print_table(&rows);
    Ok((error_max, operations_error_max))
}

/// The traffic of one of two instances, as the profile tells it.
fn trace_twin(stage: &TwinStage, scale: u64) -> Result<serde_json::Value> {
    let own = std::env::current_exe()?;
    let own = own.file_name().context("this program has a name")?;
    let own = own.to_string_lossy().into_owned();
    let place = tempfile::tempdir()?;
    let directory = place.path().join("work");
    fs::create_dir_all(directory.join("batch"))?;
    for (at, file) in stage.files(2, scale).into_iter().enumerate() {
        let size = file.size.max(file.unique);
        File::create(batch_path(&directory, stage.name, at))?.set_len(size)?;
    }
    let profile = place.path().join("profile");
    let scale = scale.to_string();
    let mut found = serde_json::Value::Null;
    for instance in INSTANCES {
        let words = [
            own.as_str(),
            TWIN_PROCESS,
            stage.name,
            instance,
            scale.as_str(),
        ];
        found = trace_command(&directory, &profile, instance, &words)?;
    }
    let total = found["rows"].as_array().and_then(|rows| rows.last());
    Ok(total.context("a profile has a total")?["traffic"].clone())
}

/// The largest relative error of the figures of a role; adds them to a table.
fn compare_role(
    stage: &TwinStage,
    role: usize,
    scale: u64,
    (traffic, rows): (&serde_json::Value, &mut Vec<Vec<String>>),
) -> Result<f64> {
    let (files, table_traffic, table_unique, table_static) = stage.roles[role];
    let measured = &traffic["roles"][role];
    let name = ROLES[role];
    ensure!(
        measured["files"] == files,
        "{}: {name} files: {measured}",
        stage.name
    );
    let figures = [
        ("traffic_bytes", table_traffic),
        ("unique_bytes", table_unique),
        ("static_bytes", table_static),
    ];
    let mut error_max = 0.0f64;
    for (figure, table) in figures {
        if table < COMPARED_MB_MIN {
            continue;
        }
        let bytes = measured[figure].as_f64().context("a figure is a number")?;
        let mb = bytes * scale as f64 / 1e6;
        error_max = error_max.max((mb - table).abs() / table);
        rows.push(vec![
            stage.name.to_owned(),
            name.to_owned(),
            figure.to_owned(),
            format!("{table:.2}"),
            format!("{mb:.2}"),
        ]);
    }
    Ok(error_max)
}

fn compare_operations(stage: &TwinStage, scale: u64, traffic: &serde_json::Value) -> Result<f64> {
    let counts = &traffic["operations"];
    let done = counts["read"].as_f64().zip(counts["write"].as_f64());
    let done = done.map(|(reads, writes)| reads + writes);
    let done = done.context("there are counts")?;
    // Each page of a mapping is a read.
    let files = stage.files(2, scale).into_iter();
    let pages: u64 = files.map(|file| file.unique.div_ceil(4096)).sum();
    let mapped = if stage.is_mapped { pages } else { 0 };
    let expected = (count_operations(stage, scale) + mapped) as f64;
    Ok((done - expected).abs() / expected)
}
