//! Fuzzing on stable Rust: valid inputs are mutated, and an input that fails is reduced to the
//! fewest mutations.
//!
//! A few seconds of it run with the other tests, always with the same inputs. `make fuzz` sets
//! `FUZZ_SECONDS`, and each target then runs for that long with new inputs. `make quick` sets
//! `FUZZ_INPUTS` to fewer than usual.

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use prost::Message;

/// Inputs of one campaign, unless `FUZZ_INPUTS` is set. With as many, each planted bug is found.
const INPUTS: u32 = 20_000;
/// The most mutations of one input.
const MUTATIONS: usize = 6;
/// Numbers at which arithmetic goes wrong.
const NUMBERS: [u64; 8] = [
    0,
    1,
    0x7f,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    u64::MAX,
];

#[derive(Clone, Debug)]
enum Mutation {
    Flip(Index, u8),
    Set(Index, u8),
    Number {
        at: Index,
        number: Index,
        bytes: usize,
    },
    Digits(Index, Index),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    /// Copies bytes from another seed.
    Splice {
        seed: Index,
        from: Index,
        at: Index,
        bytes: usize,
    },
    Truncate(Index),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<Index>;
    prop_oneof![
        4 => (at(), 0..8u8).prop_map(|(at, bit)| Mutation::Flip(at, bit)),
        3 => (at(), any::<u8>()).prop_map(|(at, byte)| Mutation::Set(at, byte)),
        2 => (at(), at(), prop::sample::select(vec![1, 2, 4, 8]))
            .prop_map(|(at, number, bytes)| Mutation::Number { at, number, bytes }),
        1 => (at(), at()).prop_map(|(at, number)| Mutation::Digits(at, number)),
        2 => (at(), prop::collection::vec(any::<u8>(), 1..9))
            .prop_map(|(at, bytes)| Mutation::Insert(at, bytes)),
        2 => (at(), 1..64usize).prop_map(|(at, bytes)| Mutation::Remove(at, bytes)),
        2 => (at(), at(), at(), 1..64usize).prop_map(|(seed, from, at, bytes)| {
            Mutation::Splice { seed, from, at, bytes }
        }),
        1 => at().prop_map(Mutation::Truncate),
    ]
}

impl Mutation {
    fn apply(&self, input: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        let place = |at: &Index, length: usize| at.index(length + 1);
        match self {
            Mutation::Flip(at, bit) => {
                if !input.is_empty() {
                    let at = at.index(input.len());
                    input[at] ^= 1 << bit;
                }
            }
            Mutation::Set(at, byte) => {
                if !input.is_empty() {
                    let at = at.index(input.len());
                    input[at] = *byte;
                }
            }
            Mutation::Number { at, number, bytes } => {
                if input.len() >= *bytes {
                    let at = at.index(input.len() - bytes + 1);
                    let number = NUMBERS[number.index(NUMBERS.len())].to_le_bytes();
                    input[at..at + bytes].copy_from_slice(&number[..*bytes]);
                }
            }
            Mutation::Digits(at, number) => {
                let at = place(at, input.len());
                let digits = NUMBERS[number.index(NUMBERS.len())].to_string();
                input.splice(at..at, digits.bytes());
            }
            Mutation::Insert(at, bytes) => {
                let at = place(at, input.len());
                input.splice(at..at, bytes.iter().copied());
            }
            Mutation::Remove(at, bytes) => {
                let at = place(at, input.len());
                input.drain(at..(at + bytes).min(input.len()));
            }
            Mutation::Splice {
                seed,
                from,
                at,
                bytes,
            } => {
                let seed = &seeds[seed.index(seeds.len())];
                let from = place(from, seed.len());
                let copied = &seed[from..(from + bytes).min(seed.len())];
                let at = place(at, input.len());
                input.splice(at..at, copied.iter().copied());
            }
            Mutation::Truncate(at) => input.truncate(place(at, input.len())),
        }
    }
}

/// Shown as a byte string.
#[derive(Clone)]
struct Input(Vec<u8>);

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b\"{}\"", self.0.escape_ascii())
    }
}

fn inputs(seeds: &[Vec<u8>]) -> impl Strategy<Value = Input> {
    let seeds = seeds.to_vec();
    let mutations = prop::collection::vec(mutation(), 0..=MUTATIONS);
    (any::<Index>(), mutations).prop_map(move |(seed, mutations)| {
        let mut input = seeds[seed.index(seeds.len())].clone();
        for mutation in &mutations {
            mutation.apply(&mut input, &seeds);
        }
        Input(input)
    })
}

fn campaign(
    rng: TestRng,
    cases: u32,
    seeds: &[Vec<u8>],
    target: &impl Fn(&[u8]),
) -> Result<(), TestError<Input>> {
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    TestRunner::new_with_rng(config, rng).run(&inputs(seeds), |input| {
        target(&input.0);
        Ok(())
    })
}

/// A variable of the environment.
fn number(variable: &str) -> Option<u32> {
    let text = std::env::var(variable).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{variable} is a number")),
    )
}

fn fixed() -> TestRng {
    TestRng::deterministic_rng(RngAlgorithm::ChaCha)
}

fn new_inputs() -> TestRng {
    let mut seed = [0; 32];
    for bytes in seed.chunks_mut(8) {
        bytes.copy_from_slice(&RandomState::new().build_hasher().finish().to_le_bytes());
    }
    TestRng::from_seed(RngAlgorithm::ChaCha, &seed)
}

/// Runs `target`, which panics at an input that it handles wrongly, on mutations of `seeds`. Then
/// runs it once more with a planted bug: `planted` panics at some input that only a parser that
/// reads further than its first field can reach.
///
/// # Panics
/// Panics at a smallest input that fails, and if the planted bug is not found.
pub fn fuzz(name: &str, seeds: &[Vec<u8>], target: impl Fn(&[u8]), planted: impl Fn(&[u8])) {
    let seconds = number("FUZZ_SECONDS").map(u64::from);
    let cases = number("FUZZ_INPUTS").unwrap_or(INPUTS);
    let begun = Instant::now();
    let mut rng = fixed();
    let mut done = 0;
    loop {
        if let Err(failure) = campaign(rng, cases, seeds, &target) {
            panic!("{name}: {failure}");
        }
        done += u64::from(cases);
        match seconds.map(Duration::from_secs) {
            Some(least) if begun.elapsed() < least => {}
            Some(_) | None => break,
        }
        rng = new_inputs();
    }
    println!(
        "{name}: {done} inputs in {:.1} s",
        begun.elapsed().as_secs_f64()
    );
    assert!(
        campaign(fixed(), INPUTS, seeds, &planted).is_err(),
        "{name}: a planted bug was not found"
    );
}

/// Fuzzes a parser of text, such as the output of a program. The planted bug is to accept a text
/// with another result than those of `seeds`.
///
/// # Panics
/// Like [`fuzz`].
pub fn fuzz_text<T: PartialEq>(name: &str, seeds: &[&str], parse: impl Fn(&str) -> Option<T>) {
    let valid: Vec<_> = seeds.iter().map(|seed| parse(seed)).collect();
    let seeds: Vec<_> = seeds.iter().map(|seed| seed.as_bytes().to_vec()).collect();
    let parse = |bytes: &[u8]| parse(&String::from_utf8_lossy(bytes));
    let target = |bytes: &[u8]| drop(parse(bytes));
    fuzz(name, &seeds, target, |bytes| {
        let parsed = parse(bytes);
        assert!(parsed.is_none() || valid.contains(&parsed));
    });
}

/// Fuzzes a protobuf message: bytes are decoded as a server decodes them, and then parsed. The
/// planted bug is to accept a message that differs from `valid`: only an input that is still
/// decoded and parsed to its end shows it.
///
/// # Panics
/// Like [`fuzz`], and if `valid` is not.
pub fn fuzz_message<M, T, E>(name: &str, valid: &M, parse: impl Fn(&M) -> Result<T, E>)
where
    M: Message + Default + PartialEq,
{
    assert!(parse(valid).is_ok(), "{name}: the seed is valid");
    let seeds = [valid.encode_to_vec()];
    let accepted = |bytes: &[u8]| M::decode(bytes).ok().filter(|read| parse(read).is_ok());
    let target = |bytes: &[u8]| drop(accepted(bytes));
    fuzz(name, &seeds, target, |bytes| {
        assert!(accepted(bytes).is_none_or(|read| read == *valid));
    });
}
