//! Small files of a cache volume that this node has, and names that are not there, in a job: beside
//! the directory at home that they come from, which is on this machine too.

use std::cell::RefCell;
use std::path::Path;

use anyhow::Result;

use super::file_work::{FileWork, measure_rate};
use super::local_volume::measure_concurrent;
use crate::api::CacheSpec;
use crate::bench::measure::{BenchmarkVariant, Samples, run_interleaved};
use crate::bench::minimal_file_systems::immutable;
use crate::bench::shell::Shell;
use crate::bench::{BenchmarkReport, Options};
use crate::cache_cluster::CacheCluster;

/// Files that a job reads repeatedly: libraries, scripts, tables.
const WORKS: [(FileWork, &str); 4] = [
    (FileWork::OpenRead, "cache_open_read"),
    (FileWork::LookupMissing, "cache_absent"),
    (FileWork::StatRepeated, "cache_stat_again"),
    (FileWork::List, "cache_list"),
];

/// Which of [`PLACES`] is compared with which, and how the figure ends.
const COMPARED_PAIRS: [(usize, usize, &str); 4] = [
    (0, 1, ""),
    (2, 1, "_control"),
    (3, 1, "_of_smallest"),
    (0, 3, "_vs_smallest"),
];

/// Beside the cache: the directory that it comes from, a second one, and the smallest file system
/// of which the kernel keeps all.
const PLACES: [&str; 4] = ["cache", "directory", "control", "smallest"];

pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let files = options.choose(5_000, 500);
    let stage = CacheCluster::start(1, "20GB", None)?;
    let [native, control] =
        ["small-files", "as-small-files"].map(|name| stage.test_cluster.home.path().join(name));
    for place in [&native, &control] {
        let own = place.join("process-1");
        std::fs::create_dir_all(&own)?;
        measure_rate(FileWork::Create, &own, files)?;
    }
    let spec = CacheSpec::new("small-files", 200_000_000);
    let volumes = stage.create_caches(&stage.node_addresses(), &spec)?;
    let mount = format!("{}:/data:ro", volumes[0].id);
    // Jobs see their mounts before they begin.
    let smallest = immutable::start_immutable(&native)?;
    let shell = RefCell::new(Shell::start_in_job(&stage.test_cluster, &mount)?);
    report.print_section(&format!(
        "{files} files of 4 KiB of a cache on this node, in a job, beside the directory that they \
         come from, another one, and the smallest file system of which the kernel keeps all: \
         files/s"
    ));
    let places = [Path::new("/data"), &native, &control, smallest.path()];
    let mut head: Vec<String> = vec!["work".to_owned()];
    head.extend(PLACES.map(str::to_owned));
    head.extend(
        COMPARED_PAIRS.map(|(one, other, _)| format!("{} / {}", PLACES[one], PLACES[other])),
    );
    let mut rows = vec![head];
    for (work, figure) in WORKS {
        let mut ways: Vec<_> = PLACES
            .iter()
            .zip(places)
            .map(|(name, place)| {
                let (place, shell) = (place.to_string_lossy().into_owned(), &shell);
                BenchmarkVariant::new(name, move || {
                    measure_concurrent(&mut shell.borrow_mut(), work, &place, files, 1)
                })
            })
            .collect();
        // The first time files come from home, and names are learned.
        for way in &mut ways {
            (way.run)()?;
        }
        let found: Vec<Samples> = run_interleaved(options.choose(9, 2), &mut ways)?;
        let mut cells = vec![work.name().to_owned()];
        cells.extend(found.iter().map(Samples::to_string));
        for (one, other, end) in COMPARED_PAIRS {
            let ratio = found[one].ratio_to(&found[other]);
            report.add_samples(&format!("{figure}{end}"), &ratio);
            cells.push(ratio.to_string());
        }
        rows.push(cells);
    }
    report.print_table(&rows);
    Ok(())
}
