//! What stands between `$(` and `)`: a variable, a column of a table's row, a function of them, and
//! a format. It knows no values.

use super::name_functions::{NAME_FUNCTIONS, NameFunction};
use super::spelling::find_nearest;

/// Functions inside functions: those of a person are one or two.
const CALL_DEPTH_MAX: usize = 16;

/// A reference as it is written.
pub(super) struct Reference<'t> {
    pub(super) expression: Expression<'t>,
    /// What follows a colon.
    pub(super) format: Option<&'t str>,
}

/// What gives a text.
pub(super) enum Expression<'t> {
    Variable {
        name: &'t str,
        column: Option<&'t str>,
    },
    /// A text in quotes.
    Text(&'t str),
    Call {
        function: &'static NameFunction,
        arguments: Vec<Self>,
    },
}

/// Why a text is no reference: a message with a hint.
pub(super) type ReferenceError = (String, String);

/// The bytes of `$(...)` at the beginning of a text, up to the parenthesis that closes it on the
/// same line; none when nothing does. Quotes count inside a function's parentheses only.
pub(super) fn find_reference_end(text: &str) -> Option<usize> {
    let (mut depth, mut quote) = (0, None);
    for (at, c) in text.char_indices().skip(1) {
        match (c, quote) {
            ('\n', _) => return None,
            (_, Some(open)) => quote = quote.filter(|_| c != open),
            ('\'' | '"', None) if depth > 1 => quote = Some(c),
            ('(', None) => depth += 1,
            (')', None) if depth == 1 => return Some(at + 1),
            (')', None) => depth -= 1,
            (_, None) => {}
        }
    }
    None
}

/// Whether a text begins with `$(NAME(`: then it is one piece with all its blanks and quotes.
pub(super) fn is_call(text: &str) -> bool {
    let Some(inside) = text.strip_prefix("$(") else {
        return false;
    };
    let rest = inside.trim_start_matches(is_name_letter);
    rest.len() < inside.len() && rest.starts_with('(')
}

/// The name of the variable that a reference is about, whether it is well formed or not.
pub(super) fn root_name(inside: &str) -> Option<&str> {
    let mut rest = inside.trim();
    loop {
        let name_end = rest.find(|c| !is_name_letter(c)).unwrap_or(rest.len());
        let (name, behind) = rest.split_at(name_end);
        match behind.strip_prefix('(') {
            Some(arguments) if !name.is_empty() => rest = arguments.trim_start(),
            _ => return Some(name).filter(|name| !name.is_empty()),
        }
    }
}

/// Whether a text is a variable alone, with or without a column or a format.
pub(super) fn is_plain_variable(inside: &str) -> bool {
    !inside.is_empty()
        && inside
            .chars()
            .all(|c| is_name_letter(c) || c == '.' || c == ':')
}

/// Reads what is between `$(` and `)`.
///
/// # Errors
/// A function that does not exist, has too few or too many arguments, or is not closed.
pub(super) fn parse_reference(inside: &str) -> Result<Reference<'_>, ReferenceError> {
    if !is_call(&format!("$({inside}")) {
        let (name, format) = match inside.split_once(':') {
            Some((name, format)) => (name, Some(format)),
            None => (inside, None),
        };
        return Ok(Reference {
            expression: parse_variable(name),
            format,
        });
    }
    let mut rest = inside;
    let expression = parse_expression(&mut rest, 0)?;
    match rest.trim_start().strip_prefix(':') {
        Some(format) => Ok(Reference {
            expression,
            format: Some(format),
        }),
        None if rest.trim().is_empty() => Ok(Reference {
            expression,
            format: None,
        }),
        None => Err((
            format!("unexpected '{}' in '$({inside})'", rest.trim()),
            "a function ends with ')'".to_owned(),
        )),
    }
}

fn parse_variable(text: &str) -> Expression<'_> {
    match text.split_once('.') {
        Some((name, column)) => Expression::Variable {
            name,
            column: Some(column),
        },
        None => Expression::Variable {
            name: text,
            column: None,
        },
    }
}

fn parse_expression<'t>(
    rest: &mut &'t str,
    depth: usize,
) -> Result<Expression<'t>, ReferenceError> {
    *rest = rest.trim_start();
    if depth > CALL_DEPTH_MAX {
        let message = format!("more than {CALL_DEPTH_MAX} functions inside each other");
        return Err((message, "use fewer".to_owned()));
    }
    if let Some(quote) = rest.chars().next().filter(|c| matches!(c, '\'' | '"')) {
        let inside = &rest[1..];
        let Some(end) = inside.find(quote) else {
            let message = "a quote is never closed inside '$('".to_owned();
            return Err((message, format!("close it with {quote}")));
        };
        *rest = &inside[end + 1..];
        return Ok(Expression::Text(&inside[..end]));
    }
    let end = rest.find(['(', ')', ',', ':']).unwrap_or(rest.len());
    let (name, behind) = rest.split_at(end);
    let Some(arguments) = behind.strip_prefix('(') else {
        *rest = behind;
        return Ok(parse_variable(name.trim_end()));
    };
    let function = find_function(name)?;
    *rest = arguments;
    parse_arguments(function, rest, depth)
}

fn parse_arguments<'t>(
    function: &'static NameFunction,
    rest: &mut &'t str,
    depth: usize,
) -> Result<Expression<'t>, ReferenceError> {
    let mut arguments = Vec::new();
    let form = || format!("write {}", function.form);
    loop {
        arguments.push(parse_expression(rest, depth + 1)?);
        *rest = rest.trim_start();
        if let Some(behind) = rest.strip_prefix(',') {
            *rest = behind;
        } else if let Some(behind) = rest.strip_prefix(')') {
            *rest = behind;
            break;
        } else {
            let message = format!("'{}' is not closed by ')'", function.name);
            return Err((message, form()));
        }
    }
    if arguments.len() != function.arguments {
        let given = arguments.len();
        let message = format!(
            "the wrong number of arguments for '{}': {given}",
            function.name
        );
        return Err((message, form()));
    }
    Ok(Expression::Call {
        function,
        arguments,
    })
}

fn find_function(name: &str) -> Result<&'static NameFunction, ReferenceError> {
    let found = NAME_FUNCTIONS.iter().find(|known| known.name == name);
    found.ok_or_else(|| {
        let names = || NAME_FUNCTIONS.iter().map(|known| known.name);
        let hint = match find_nearest(name, names()) {
            Some(near) => format!("did you mean '{near}'?"),
            None => format!(
                "the functions are {}",
                names().collect::<Vec<_>>().join(", ")
            ),
        };
        (format!("unknown function '{name}'"), hint)
    })
}

fn is_name_letter(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_end_at_their_own_parenthesis() {
        assert_eq!(find_reference_end("$(i)x)"), Some(4));
        assert_eq!(find_reference_end("$(f(g(i)))"), Some(10));
        assert_eq!(find_reference_end("$(f(i, \")\"))"), Some(12));
        assert_eq!(find_reference_end("$(it's)"), Some(7));
        assert_eq!(find_reference_end("$(i\n)"), None);
    }

    #[test]
    fn root_of_a_reference_is_its_variable() {
        assert_eq!(root_name("row.sample:03"), Some("row"));
        assert_eq!(root_name("stem( basename(s))"), Some("s"));
        assert_eq!(root_name("date +%s"), Some("date"));
        assert_eq!(root_name("\"$x\""), None);
    }
}
