//! What a statement may begin with, and how each is written.

use super::ast::Keyword;

/// Each keyword as it is written.
pub(super) const KEYWORDS: [(&str, Keyword); 13] = [
    ("job", Keyword::Job),
    ("parent", Keyword::Parent),
    ("volume", Keyword::Volume),
    ("mount", Keyword::Mount),
    ("extract", Keyword::Extract),
    ("retry", Keyword::Retry),
    ("share", Keyword::Share),
    ("root", Keyword::Root),
    ("program", Keyword::Program),
    ("template", Keyword::Template),
    ("include", Keyword::Include),
    ("for", Keyword::For),
    ("end", Keyword::End),
];

impl Keyword {
    /// The keyword that a word is, in any case: files of HTCondor's DAGMan shout.
    pub(super) fn from_word(word: &str) -> Option<Self> {
        let known = KEYWORDS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(word));
        known.map(|(_, keyword)| *keyword)
    }

    /// Whether a statement may end with `{` and a body.
    pub(super) fn has_body(self) -> bool {
        matches!(self, Self::Job | Self::Template)
    }

    /// How the statement is written.
    pub(super) fn syntax(self) -> &'static str {
        match self {
            Self::Job => "write 'job NAME FILE', or 'job NAME {' and 'key = value' lines up to '}'",
            Self::Parent => "write 'parent JOB ... child JOB ...'",
            Self::Volume => {
                "write 'volume NAME scratch SIZE [files N] [from URL]' \
                 or 'volume NAME [cache] URL SIZE [lru|mru] [warm] [files N]'"
            }
            Self::Mount => "write 'mount VOLUME JOB PATH [ro|rw|write-back]'",
            Self::Extract => "write 'extract VOLUME FILE URL', or 'extract VOLUME FILES ... URL/'",
            Self::Retry => "write 'retry JOB N'",
            Self::Share => "write 'share /tmp JOB ...'; /var/tmp and /dev/shm can be shared, too",
            Self::Root => "write 'root VOLUME JOB ...'",
            Self::Program => "write 'program NAME from URL [SIZE]', or a path beside the workflow",
            Self::Template => {
                "write 'template NAME PARAMETER ... {', or 'PARAMETER=DEFAULT', and 'key = value' \
                 lines up to '}'"
            }
            Self::Include => "write 'include FILE'",
            Self::For => "write 'for NAME in FIRST..LAST' or 'for NAME in WORD ...'",
            Self::End => "write 'end' on a line of its own",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn editors_grammar_has_all_keywords() {
        let grammar = include_str!("../../integrations/textmate/bafs.tmLanguage.json");
        for (keyword, _) in KEYWORDS {
            assert!(grammar.contains(keyword), "{keyword}");
        }
    }
}
