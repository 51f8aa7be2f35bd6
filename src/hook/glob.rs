//! Patterns for names: `*` matches any characters, `?` matches one; all other characters match
//! themselves.

use std::fmt;

/// A pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Glob(String);

impl Glob {
    /// Every text is a valid pattern.
    pub fn new(pattern: impl Into<String>) -> Glob {
        Glob(pattern.into())
    }

    /// Whether the pattern matches all of `text`. The time is at most proportional to the product
    /// of both lengths.
    pub fn matches(&self, text: &str) -> bool {
        let pattern: Vec<char> = self.0.chars().collect();
        let text: Vec<char> = text.chars().collect();
        let (mut p, mut t) = (0, 0);
        // The position of the last star, and the position in the text at which matching after it is
        // being tried.
        let mut star: Option<(usize, usize)> = None;
        while t < text.len() {
            if pattern.get(p) == Some(&'*') {
                star = Some((p, t));
                p += 1;
            } else if pattern.get(p).is_some_and(|c| *c == '?' || *c == text[t]) {
                p += 1;
                t += 1;
            } else if let Some((at, from)) = star {
                // Let the star match one more character.
                star = Some((at, from + 1));
                p = at + 1;
                t = from + 1;
            } else {
                return false;
            }
        }
        pattern[p..].iter().all(|c| *c == '*')
    }
}

impl fmt::Display for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A direct implementation of the definition, with exponential run time.
    fn slow(pattern: &[char], text: &[char]) -> bool {
        match (pattern.split_first(), text.split_first()) {
            (None, None) => true,
            (None, Some(_)) => false,
            (Some(('*', rest)), None) => slow(rest, text),
            (Some(('*', rest)), Some((_, tail))) => slow(rest, text) || slow(pattern, tail),
            (Some(_), None) => false,
            (Some((c, rest)), Some((d, tail))) => (*c == '?' || c == d) && slow(rest, tail),
        }
    }

    #[test]
    fn stars_and_question_marks() {
        for (pattern, text, wanted) in [
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("db-*", "db-0", true),
            ("db-*", "web-0", false),
            ("db-?", "db-10", false),
            ("*-data-*", "pg-data-0", true),
            ("a*b*c", "aXbYbZc", true),
            ("*a", "aaab", false),
            ("ö?", "öä", true),
            ("[a]", "a", false),
        ] {
            assert_eq!(Glob::new(pattern).matches(text), wanted, "{pattern} {text}");
        }
    }

    #[test]
    fn many_stars_take_no_eternity() {
        let pattern = Glob::new("*a".repeat(200) + "b");
        assert!(!pattern.matches(&"a".repeat(5000)));
    }

    proptest! {
        #[test]
        fn it_is_what_the_definition_says(pattern in "[ab*?]{0,8}", text in "[ab]{0,10}") {
            let chars = |text: &str| text.chars().collect::<Vec<_>>();
            prop_assert_eq!(
                Glob::new(&pattern).matches(&text),
                slow(&chars(&pattern), &chars(&text))
            );
        }

        #[test]
        fn a_name_matches_itself(name in "[^*?]{0,20}") {
            prop_assert!(Glob::new(&name).matches(&name));
        }
    }
}
