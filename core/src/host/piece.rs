//! Data of a range of an image that is sent to another host, without its zeros.

/// Blocks of this many bytes that contain only zeros are left out.
pub const ZERO_BLOCK: u64 = 4096;

/// Data of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset of the first byte in the image.
    pub offset: u64,
    pub bytes: Vec<u8>,
}

impl Piece {
    /// Offset of the byte after the last one.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes.len() as u64)
    }
}

/// Adds what was read at an offset to pieces that ascend, without blocks of zeros. The blocks are
/// counted from the beginning of the image, so the result depends on its content alone.
pub fn add(pieces: &mut Vec<Piece>, mut offset: u64, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let rest = ZERO_BLOCK - offset % ZERO_BLOCK;
        let (block, after) = bytes.split_at(bytes.len().min(rest as usize));
        if block.iter().any(|byte| *byte != 0) {
            match pieces.last_mut() {
                Some(last) if last.end() == offset => last.bytes.extend_from_slice(block),
                Some(_) | None => pieces.push(Piece {
                    offset,
                    bytes: block.to_vec(),
                }),
            }
        }
        offset += block.len() as u64;
        bytes = after;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_have_all_data_and_no_block_of_zeros(
            blocks in prop::collection::vec(0_u8..3, 1..40),
            first in 0..8_u64,
            cuts in prop::collection::vec(0_usize..40, 0..6),
        ) {
            let start = first * ZERO_BLOCK;
            let all: Vec<u8> = blocks
                .iter()
                .flat_map(|byte| {
                    let mut block = vec![0; ZERO_BLOCK as usize];
                    block[17] = *byte;
                    block
                })
                .collect();
            let read = |cuts: &[usize]| {
                let (mut pieces, mut at) = (Vec::new(), 0);
                let ends = cuts.iter().map(|cut| cut * ZERO_BLOCK as usize);
                for end in ends.filter(|end| *end < all.len()).chain([all.len()]) {
                    if end > at {
                        add(&mut pieces, start + at as u64, &all[at..end]);
                        at = end;
                    }
                }
                pieces
            };
            let pieces = read(&[]);
            let mut cuts = cuts;
            cuts.sort_unstable();
            prop_assert_eq!(&pieces, &read(&cuts), "however it was read");
            let mut written = vec![0; all.len()];
            for piece in &pieces {
                let at = (piece.offset - start) as usize;
                written[at..at + piece.bytes.len()].copy_from_slice(&piece.bytes);
            }
            prop_assert!(written == all);
            let sent: usize = pieces.iter().map(|piece| piece.bytes.len()).sum();
            let data = blocks.iter().filter(|byte| **byte != 0).count();
            prop_assert_eq!(sent, data * ZERO_BLOCK as usize);
        }
    }
}
