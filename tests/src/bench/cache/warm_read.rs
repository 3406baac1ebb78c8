//! Reads of a cache volume whose blocks are on this node, through a job's mount, beside the same
//! file on the local file system. Both are read by fio, an unmodified program, within the same job.

use std::path::{Path, PathBuf};
use std::{cell::RefCell, rc::Rc};

use anyhow::{Result, ensure};

use super::part_outcome::{MIB, PartOutcome};
use crate::api::CacheSpec;
use crate::bench::machine::{CacheDropScope, drop_caches};
use crate::bench::measure::{BenchmarkVariant, Samples, run_interleaved, table_row};
use crate::bench::minimal_file_systems::passthrough::PassthroughMount;
use crate::bench::shell::Shell;
use crate::bench::{BenchmarkReport, Options};
use crate::cache_cluster::{CacheCluster, DATA_FILE};
use crate::content::Content;

/// A way to read, as fio calls it.
struct ReadPattern {
    figure: &'static str,
    name: &'static str,
    options: &'static str,
}

const PATTERNS: [ReadPattern; 3] = [
    ReadPattern {
        figure: "seq",
        name: "sequential, 1 MiB",
        options: "--ioengine=psync --rw=read --bs=1M",
    },
    ReadPattern {
        figure: "rand",
        name: "random, 4 KiB",
        options: "--ioengine=psync --rw=randread --bs=4k --norandommap",
    },
    ReadPattern {
        figure: "mmap",
        name: "mmap, every page",
        options: "--ioengine=mmap --rw=read --bs=4k",
    },
];

/// Where pages are before a measurement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PageLocation {
    InMemory,
    OnDisk,
}

/// All patterns, with pages in memory and with pages on disk.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<PartOutcome> {
    measure(options, report, |pages, pattern| {
        let kind = match pages {
            PageLocation::InMemory => "warm",
            PageLocation::OnDisk => "disk",
        };
        Some(format!("{kind}_{}_vs_native", pattern.figure))
    })?;
    Ok(PartOutcome::default())
}

/// The same figures for the kernel's own read from the page cache.
pub(in crate::bench) fn run_passthrough(
    options: &Options,
    report: &mut BenchmarkReport,
) -> Result<()> {
    measure(options, report, |pages, pattern| {
        let name = match pattern.figure {
            "seq" => "pass_seq_read",
            "rand" => "pass_rand4k",
            _ => "pass_mmap",
        };
        (pages == PageLocation::InMemory).then(|| name.to_owned())
    })
}

/// Measures what has a figure.
fn measure(
    options: &Options,
    report: &mut BenchmarkReport,
    figure: impl Fn(PageLocation, &ReadPattern) -> Option<String>,
) -> Result<()> {
    if let Some(reason) = crate::mount_obstacle() {
        anyhow::bail!("jobs with volumes cannot run here: {reason}");
    }
    let set = MIB * options.choose(512, 64);
    let content = Content::new(2, set);
    let stage = CacheCluster::start(1, "20GB", None)?;
    stage.write_data_set("warm", &content)?;
    stage.write_data_set("as-warm", &content)?;
    let spec = CacheSpec::new("warm", 2 * set as u64);
    let volumes = stage.create_caches(&stage.node_addresses(), &spec)?;
    let [native, control] =
        ["warm", "as-warm"].map(|it| stage.test_cluster.home.path().join(it).join(DATA_FILE));
    // Jobs see their mounts before they begin.
    let smallest = PassthroughMount::start(&native);
    report.print_section(&format!(
        "{} MiB on this node, read by fio in a job: MB/s through the mount, natively, and through \
         the smallest file system that has the kernel read its file by itself",
        set / MIB
    ));
    let files = ComparedFiles {
        shell: Rc::new(RefCell::new(Shell::start_in_job(
            &stage.test_cluster,
            &format!("{}:/data:ro", volumes[0].id),
        )?)),
        minimal: smallest.as_ref().ok().map(PassthroughMount::path),
        native,
        control,
        set,
    };
    files.fill_cache()?;
    let mut rows = vec![table_row([
        "pages",
        "pattern",
        "bafs",
        "native",
        "bafs / native",
        "control / native",
        "smallest / native",
        "bafs / smallest",
    ])];
    for pages in [PageLocation::InMemory, PageLocation::OnDisk] {
        for pattern in &PATTERNS {
            let Some(name) = figure(pages, pattern) else {
                continue;
            };
            let found = files.compare(options, pages, pattern)?;
            report.add_samples(&name, &found.ratio_to_native);
            let stem = name.trim_end_matches("_vs_native");
            report.add_samples(&format!("{stem}_control"), &found.control);
            if let Some((smallest_to_native, to_smallest)) = &found.minimal {
                report.add_samples(&format!("{stem}_vs_smallest"), to_smallest);
                report.add_samples(&format!("smallest_of_{stem}_vs_native"), smallest_to_native);
            }
            rows.push(found.row);
        }
    }
    report.print_table(&rows);
    if let Err(why) = smallest {
        report.add_missing("warm_rand_vs_smallest", &format!("{why:#}"));
    }
    Ok(())
}

/// The same bytes in three places, as fio in a job calls them.
struct ComparedFiles {
    shell: Rc<RefCell<Shell>>,
    native: PathBuf,
    /// A second file that was made in the same way.
    control: PathBuf,
    minimal: Option<PathBuf>,
    set: usize,
}

/// The figures of one pattern.
struct PatternResult {
    ratio_to_native: Samples,
    /// The second native file beside the first.
    control: Samples,
    /// Of the smallest file system: its own ratio to native, and that of BAFS to it.
    minimal: Option<(Samples, Samples)>,
    row: Vec<String>,
}

impl ComparedFiles {
    /// Fills the node's cache, and checks it.
    fn fill_cache(&self) -> Result<()> {
        let compare = format!(
            "cmp /data/{DATA_FILE} {} && echo same",
            self.native.display()
        );
        let same = self.shell.borrow_mut().run_line(&compare)?;
        ensure!(
            same.trim() == "same",
            "the cache differs from its source: {same}"
        );
        Ok(())
    }

    fn compare(
        &self,
        options: &Options,
        pages: PageLocation,
        pattern: &ReadPattern,
    ) -> Result<PatternResult> {
        let mounted = Path::new("/data").join(DATA_FILE);
        let way = |name, path: &Path| {
            let path = path.to_owned();
            BenchmarkVariant::new(name, move || {
                if pages == PageLocation::OnDisk {
                    let cold = drop_caches(&[&self.native])?;
                    ensure!(
                        cold == CacheDropScope::Everything,
                        "only root can empty the page cache"
                    );
                }
                run_fio(
                    &mut self.shell.borrow_mut(),
                    &path,
                    self.set,
                    pages,
                    pattern,
                )
            })
        };
        let mut ways = vec![
            way("bafs", &mounted),
            way("native", &self.native),
            way("control", &self.control),
        ];
        let smallest = self.minimal.as_ref();
        if let Some(path) = smallest.filter(|_| pages == PageLocation::InMemory) {
            ways.push(way("smallest", path));
        }
        let rounds = if pages == PageLocation::InMemory {
            options.choose(7, 2)
        } else {
            options.choose(5, 1)
        };
        if pages == PageLocation::InMemory {
            for way in &mut ways {
                (way.run)()?;
            }
        }
        let samples = run_interleaved(rounds, &mut ways)?;
        let to_native = samples[0].ratio_to(&samples[1]);
        let control = samples[2].ratio_to(&samples[1]);
        let smallest = samples.get(3).map(|smallest| {
            (
                smallest.ratio_to(&samples[1]),
                samples[0].ratio_to(smallest),
            )
        });
        let text = |samples: Option<&Samples>| samples.map(ToString::to_string).unwrap_or_default();
        let row = table_row([
            if pages == PageLocation::InMemory {
                "memory"
            } else {
                "disk"
            },
            pattern.name,
            &samples[0].to_string(),
            &samples[1].to_string(),
            &to_native.to_string(),
            &control.to_string(),
            &text(smallest.as_ref().map(|(smallest, _)| smallest)),
            &text(smallest.as_ref().map(|(_, ratio)| ratio)),
        ]);
        Ok(PatternResult {
            ratio_to_native: to_native,
            control,
            minimal: smallest,
            row,
        })
    }
}

/// Reads a file once with a pattern: MB/s. Random reads of pages on disk read a part of it.
fn run_fio(
    shell: &mut Shell,
    path: &Path,
    set: usize,
    pages: PageLocation,
    pattern: &ReadPattern,
) -> Result<f64> {
    let part = match (pages, pattern.figure) {
        (PageLocation::OnDisk, "rand") => set / 16,
        _ => set,
    };
    let options = format!(
        "--name=read --filename={} --readonly --invalidate=0 --size={set} --io_size={part} {}",
        path.display(),
        pattern.options
    );
    shell.run_fio(&options, part as u64)
}
