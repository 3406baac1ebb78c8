# A line of input is a seed and a number of records. Writes the records, 64 bytes each: a key, and
# four numbers (Park and Miller, 1988: the same numbers with every awk).
function random() { return seed = seed * 16807 % 2147483647 }
{
    seed = $1
    for (record = 1; record <= $2; record++) {
        key = random()
        printf "%010d %010d %010d %010d %019d\n", key, random(), random(), random(), record
    }
}
