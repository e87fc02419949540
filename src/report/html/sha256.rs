//! SHA-256 (FIPS 180-4): a page names the one script that it may run by its hash, so that nothing
//! that a trace brings along can be one.

/// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
fn round_constants() -> [u32; 64] {
    let mut constants = [0; 64];
    for (constant, prime) in constants.iter_mut().zip(primes()) {
        *constant = root_bits(prime, 3);
    }
    constants
}

/// The first 32 bits of the fractional parts of the square roots of the first 8 primes.
fn first_state() -> [u32; 8] {
    let mut state = [0; 8];
    for (word, prime) in state.iter_mut().zip(primes()) {
        *word = root_bits(prime, 2);
    }
    state
}

fn primes() -> impl Iterator<Item = u128> {
    (2u128..).filter(|&n| (2..n).take_while(|d| d * d <= n).all(|d| n % d != 0))
}

/// 32 bits behind the point of the square or cube root of a small number, by bisection in whole
/// numbers: the largest x with x^degree ≤ number × 2^(32 × degree).
fn root_bits(number: u128, degree: u32) -> u32 {
    let target = number << (32 * degree);
    let (mut low, mut high) = (0u128, 1u128 << 37);
    while high - low > 1 {
        let middle = (low + high) / 2;
        if middle.pow(degree) <= target {
            low = middle;
        } else {
            high = middle;
        }
    }
    low as u32
}

/// The hash of some bytes.
pub(super) fn sha256(bytes: &[u8]) -> [u8; 32] {
    let constants = round_constants();
    let mut state = first_state();
    let mut padded = bytes.to_vec();
    padded.push(0x80);
    padded.resize((padded.len() + 8).next_multiple_of(64) - 8, 0);
    padded.extend((bytes.len() as u64 * 8).to_be_bytes());
    for part in padded.chunks_exact(64) {
        round(&mut state, part, &constants);
    }
    let mut hash = [0; 32];
    for (four, word) in hash.chunks_exact_mut(4).zip(state) {
        four.copy_from_slice(&word.to_be_bytes());
    }
    hash
}

fn round(state: &mut [u32; 8], part: &[u8], constants: &[u32; 64]) {
    let mut words = [0u32; 64];
    for (word, four) in words.iter_mut().zip(part.chunks_exact(4)) {
        *word = u32::from_be_bytes([four[0], four[1], four[2], four[3]]);
    }
    for at in 16..64 {
        let (near, far) = (words[at - 2], words[at - 15]);
        let low = far.rotate_right(7) ^ far.rotate_right(18) ^ (far >> 3);
        let high = near.rotate_right(17) ^ near.rotate_right(19) ^ (near >> 10);
        words[at] = words[at - 16].wrapping_add(low).wrapping_add(words[at - 7]).wrapping_add(high);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (word, constant) in words.iter().zip(constants) {
        let sum = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let choice = (e & f) ^ (!e & g);
        let first =
            h.wrapping_add(sum).wrapping_add(choice).wrapping_add(*constant).wrapping_add(*word);
        let sum = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let second = sum.wrapping_add((a & b) ^ (a & c) ^ (b & c));
        (h, g, f, e) = (g, f, e, d.wrapping_add(first));
        (d, c, b, a) = (c, b, a, first.wrapping_add(second));
    }
    for (word, more) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *word = word.wrapping_add(more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> String {
        sha256(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn hashes_are_those_of_the_standard() {
        // The examples of FIPS 180-4, and the empty text.
        assert_eq!(hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(
            hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
        );
    }
}
