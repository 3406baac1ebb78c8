//! The picture of the lives of blocks: for neighbouring blocks of each file a bar from the first
//! access to the last, in the colour of the role.

use bafs_profile::report::Report;
use bafs_profile::role::Role;

use crate::gantt_chart::{Bar, Gantt};
use crate::svg_chart::Colour;

/// Rows of the picture; files with little traffic come last and are left out.
const ROWS_MAX: usize = 120;
/// The last letters of a path that fit before a row.
const NAME_LETTERS: usize = 15;
/// A bar is at least this part of the width, so that a moment is seen.
const WIDTH_MIN: f64 = 0.002;

fn colour(role: Role) -> Colour {
    match role {
        Role::Endpoint => Colour(2),
        Role::Pipeline => Colour(1),
        Role::Batch => Colour(0),
    }
}

fn short_name(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or(path);
    let letters = name.chars().count();
    match letters > NAME_LETTERS {
        true => {
            let rest: String = name.chars().skip(letters - NAME_LETTERS + 1).collect();
            format!("…{rest}")
        }
        false => name.to_owned(),
    }
}

/// Draws the picture.
pub(super) fn render_lifetimes(report: &Report) -> String {
    let lives = report.block_lives.iter().take(ROWS_MAX);
    let end_s = report.rows.last().map_or(1.0, |total| total.wall_s);
    let mut rows = Vec::new();
    let mut bars = Vec::new();
    for (row, life) in lives.enumerate() {
        rows.push(short_name(&life.path));
        bars.push(Bar {
            row,
            from: life.first_s,
            until: life.last_s.max(life.first_s + end_s * WIDTH_MIN),
            colour: colour(life.role),
            label: String::new(),
        });
    }
    let legend = Role::ALL.map(|role| (role.name().to_owned(), colour(role)));
    let chart = Gantt {
        title: "Lives of blocks: from the first access to the last".to_owned(),
        x: "seconds".to_owned(),
        rows,
        bars,
        legend: legend.to_vec(),
    };
    chart.render_svg()
}
