# Of sorted records: how many there are, and the smallest, median, largest and mean key.
{
    key[NR] = $1
    sum += $1
}
END {
    printf "records %d\nsmallest %d\nmedian %d\n", NR, key[1], key[int((NR + 1) / 2)]
    printf "largest %d\nmean %.3f\n", key[NR], sum / NR
}
